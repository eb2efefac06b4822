"""The command line: commands only parse, call, and say what came of it."""

from __future__ import annotations

import logging


def main() -> None:
    """Run ``turnlane``; the entry point that is installed."""
    from turnlane.cli.app import app

    # What the library would warn of, the commands say themselves, in their own words.
    logging.getLogger("turnlane").addHandler(logging.NullHandler())
    app(prog_name="turnlane")
