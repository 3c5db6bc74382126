"""`python -m sluice`, the same as the command `sluice`."""

from sluice.cli import main

main()
