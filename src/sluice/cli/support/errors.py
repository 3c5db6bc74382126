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

from sluice.cli.support.formatting import visible
from sluice.errors import ConfigError, SluiceError

REFUSED: Final = 1
WRONG_COMMAND: Final = 2
NOT_FOUND: Final = 3
NOT_REACHABLE: Final = 4
SOMETHING_WRONG: Final = 5
NEEDS_MENDING: Final = 6
INTERRUPTED: Final = 130  # as the shell counts Ctrl-C


class Failure(SluiceError):
    """Ends the command with `code`."""

    def __init__(self, what: str, do: str = "", code: int = REFUSED) -> None:
        super().__init__(what, do)
        self.code = code


def wrong_command(what: str, do: str) -> Failure:
    return Failure(what, do, WRONG_COMMAND)


@contextmanager
def guarded(trusting: str) -> Iterator[None]:
    """Turn whatever a command raises into words and an exit code. `trusting` is whom its answers come from."""
    try:
        yield
        sys.stdout.flush()
    except Failure as failure:
        _tell(failure.what, failure.do)
        raise typer.Exit(failure.code) from None
    except SluiceError as refusal:
        _tell(refusal.what, _cure_of(refusal))
        raise typer.Exit(_code_of(refusal)) from None
    except BrokenPipeError:
        _nobody_reads()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except OSError as fault:
        name = f" {fault.filename}" if fault.filename else ""
        _tell(f"cannot use{name or ' a file'}: {fault.strerror or fault}", "")
        raise typer.Exit(REFUSED) from None
    except (LookupError, TypeError, ValueError, AttributeError) as fault:
        if os.environ.get("SLUICE_TRACEBACK"):
            raise
        _tell(
            f"an answer of {trusting} cannot be read ({type(fault).__name__})",
            "See with `sluice --version` and `sluice node` whether both are the same version; "
            "SLUICE_TRACEBACK=1 shows where it happened",
        )
        raise typer.Exit(REFUSED) from None


def _cure_of(refusal: SluiceError) -> str:
    """A token opens the REST door alone; who has one may wonder why messages do not move."""
    from sluice.client import ConnectRefused

    if isinstance(refusal, ConnectRefused) and refusal.reason in (0x86, 0x87):
        return "Name a user with SLUICE_MQTT=mqtt://USER:PASSWORD@HOST:PORT, or --mqtt; a token is for REST alone"
    return refusal.do


def _code_of(refusal: SluiceError) -> int:
    from sluice.client import ConnectFailed

    if isinstance(refusal, ConnectFailed):
        return NOT_REACHABLE
    return WRONG_COMMAND if isinstance(refusal, ConfigError) else REFUSED


def _tell(what: str, do: str) -> None:
    """A server's words may hold what a peer chose: nothing of it steers the terminal."""
    try:
        print(f"sluice: {visible(what)}", file=sys.stderr)
        if do:
            print(f"  {visible(do)}", file=sys.stderr)
    except BrokenPipeError:
        pass


def _nobody_reads() -> NoReturn:
    """`sluice peek | head`: the reader has enough, and that is no failure. Python would complain once more when it
    flushes stdout at the end, so stdout now leads nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    raise typer.Exit(0)
