"""Report errors of a command: a line with the cause, a line with the remedy, and an exit code.

    0  done
    1  refused or failed: the broker refused, or a file could not be read
    2  wrong command: an invalid argument
    3  not found: no such queue, group or message
    4  not reachable: no answer at the address, or not from Sluice
    5  `doctor`, `verify`, `bench` or `pipeline audit` found something wrong

Never a traceback, and never a secret: texts are composed by Sluice, not taken from libraries.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import typer

from sluice.cli.support.formatting import escape_controls
from sluice.errors import ConfigError, SluiceError
from sluice.http_client import InvalidOption

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NOT_FOUND: Final = 3
EXIT_UNREACHABLE: Final = 4
EXIT_FINDINGS: Final = 5
EXIT_NEEDS_REPAIR: Final = 6
EXIT_INTERRUPTED: Final = 130  # what shells use for Ctrl-C

# Options of Spark's data source, in whose terms shared errors are written, and our flags for them.
OPTION_FLAGS: Final = {
    "group": "--group",
    "subscribe": "--queue",
    "url": "--url",
    "token": "--token",
    "tokenFile": "--token-file",
    "ca": "--ca",
}
_OPTION_NAME: Final = re.compile(rf"\b(?:the )?option ({'|'.join(OPTION_FLAGS)})\b")


class CommandError(SluiceError):
    """Ends the command with exit code `code`."""

    def __init__(self, resource: str, remedy: str = "", code: int = EXIT_FAILED) -> None:
        super().__init__(resource, remedy)
        self.code = code


def usage_error(what: str, do: str) -> CommandError:
    return CommandError(what, do, EXIT_USAGE)


def name_flags(text: str) -> str:
    """Replace the names of options in an error by those of flags."""
    return _OPTION_NAME.sub(lambda found: OPTION_FLAGS[found[1]], text)


@contextmanager
def exit_on_error(answer_source: str) -> Iterator[None]:
    """Turn exceptions of a command into messages and exit codes. `answer_source`: where answers
    come from.
    """
    try:
        yield
        sys.stdout.flush()
    except CommandError as failure:
        _print_error(failure.what, failure.remedy)
        raise typer.Exit(failure.code) from None
    except InvalidOption as fault:
        _print_error(name_flags(fault.what), name_flags(fault.remedy))
        raise typer.Exit(EXIT_USAGE) from None
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
    """Return the remedy. A token is valid for REST alone; users with one expect it to work for
    MQTT.
    """
    from sluice.client import ConnectRefused

    if isinstance(refusal, ConnectRefused) and refusal.reason in (0x86, 0x87):
        return (
            "Name a user with SLUICE_MQTT=mqtt://USER:PASSWORD@HOST:PORT, or --mqtt;"
            " a token is for REST alone"
        )
    return refusal.remedy


def _exit_code_for(refusal: SluiceError) -> int:
    from sluice.client import ConnectFailed

    if isinstance(refusal, ConnectFailed):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if isinstance(refusal, ConfigError) else EXIT_FAILED


def _print_error(what: str, do: str) -> None:
    """Print to stderr, with control characters of the server's text escaped."""
    try:
        print(f"sluice: {escape_controls(what)}", file=sys.stderr)
        if do:
            print(f"  {escape_controls(do)}", file=sys.stderr)
    except BrokenPipeError:
        pass


def _exit_on_broken_pipe() -> NoReturn:
    """End with code 0: in `sluice peek | head`, a closed pipe is no failure.

    Python would fail again when it flushes stdout at exit, so stdout now goes to /dev/null.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    raise typer.Exit(0)
