"""The command line. Commands parse arguments, call the library, and print the result."""

from __future__ import annotations

import logging


def main() -> None:
    """Run ``turnlane``; the entry point that is installed."""
    from turnlane.cli.app import app

    # Without a handler, Python would print warnings of the library; commands report errors.
    logging.getLogger("turnlane").addHandler(logging.NullHandler())
    app(prog_name="turnlane")
