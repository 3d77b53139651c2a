"""Run the command line: `python -m tarry`."""

from tarry.cli import main

main()
