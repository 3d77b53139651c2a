"""`python -m tarry` is `tarry`."""

from tarry.cli import main

main()
