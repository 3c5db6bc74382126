"""How a command ends when it does not end well: one line what happened, one line what to do, and a code for scripts.

    0  done
    1  refused or failed: the broker said no, or a file could not be read
    2  wrong command: an argument that makes no sense
    3  not found: no such queue, group or message
    4  not reachable: nobody answers at the address, or it is no Sluice
    5  `doctor`, `verify`, `bench` or `pipeline audit` found something wrong

Never a traceback, and never a secret: what is told is composed here and in `api`, not taken from a library's own words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import typer

from sluice.cli.support.formatting import escape_controls
from sluice.errors import ConfigError, SluiceError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_UNREACHABLE: Final = 4
EXIT_FINDINGS: Final = 5
EXIT_NEEDS_REPAIR: Final = 6
EXIT_INTERRUPTED: Final = 130  # as the shell counts Ctrl-C


class CommandError(SluiceError):
    """Ends the command with `code`."""

    def __init__(self, resource: str, remedy: str = "", code: int = EXIT_FAILED) -> None:
        super().__init__(resource, remedy)
        self.code = code


def usage_error(what: str, do: str) -> CommandError:
    return CommandError(what, do, EXIT_USAGE)


@contextmanager
def exit_on_error(answer_source: str) -> Iterator[None]:
    """Turn whatever a command raises into words and an exit code. `trusting` is whom its answers come from."""
    try:
        yield
        sys.stdout.flush()
    except CommandError as failure:
        _print_error(failure.what, failure.remedy)
        raise typer.Exit(failure.code) from None
    except SluiceError as refusal:
        _print_error(refusal.what, _remedy_for(refusal))
        raise typer.Exit(_exit_code_for(refusal)) from None
    except BrokenPipeError:
        _exit_on_broken_pipe()
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except OSError as fault:
        name = f" {fault.filename}" if fault.filename else ""
        _print_error(f"cannot use{name or ' a file'}: {fault.strerror or fault}", "")
        raise typer.Exit(EXIT_FAILED) from None
    except (LookupError, TypeError, ValueError, AttributeError) as fault:
        if os.environ.get("SLUICE_TRACEBACK"):
            raise
        _print_error(
            f"an answer of {answer_source} cannot be read ({type(fault).__name__})",
            "See with `sluice --version` and `sluice node` whether both are the same version; "
            "SLUICE_TRACEBACK=1 shows where it happened",
        )
        raise typer.Exit(EXIT_FAILED) from None


def _remedy_for(refusal: SluiceError) -> str:
    """A token opens the REST door alone; who has one may wonder why messages do not move."""
    from sluice.client import ConnectRefused

    if isinstance(refusal, ConnectRefused) and refusal.reason in (0x86, 0x87):
        return "Name a user with SLUICE_MQTT=mqtt://USER:PASSWORD@HOST:PORT, or --mqtt; a token is for REST alone"
    return refusal.remedy


def _exit_code_for(refusal: SluiceError) -> int:
    from sluice.client import ConnectFailed

    if isinstance(refusal, ConnectFailed):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if isinstance(refusal, ConfigError) else EXIT_FAILED


def _print_error(what: str, do: str) -> None:
    """A server's words may hold what a peer chose: nothing of it steers the terminal."""
    try:
        print(f"sluice: {escape_controls(what)}", file=sys.stderr)
        if do:
            print(f"  {escape_controls(do)}", file=sys.stderr)
    except BrokenPipeError:
        pass


def _exit_on_broken_pipe() -> NoReturn:
    """`sluice peek | head`: the reader has enough, and that is no failure. Python would complain once more when it
    flushes stdout at the end, so stdout now leads nowhere."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    raise typer.Exit(0)
