"""``python -m turnlane``: the same as ``turnlane``."""

from turnlane.cli import main

if __name__ == "__main__":
    main()
