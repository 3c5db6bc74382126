"""The command `sluice`: arguments in, tables or JSON out. The broker or a library does the work."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command in `sys.argv`.

    A broker keeps what it imports for as long as it runs, so `serve` loads no other command.
    """
    if sys.argv[1:2] == ["serve"] and not {"-h", "--help"}.intersection(sys.argv):
        from sluice.cli.serve import run_serve

        run_serve(sys.argv[2:])
    else:
        from sluice.cli.root import run

        run()
