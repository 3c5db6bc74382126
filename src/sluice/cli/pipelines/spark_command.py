"""Spark for one command: started when everything else is known to be well, quiet, and ended with the command.

`@pipeline(app, "archive")` registers a command whose first parameter is a `SparkVisit`, which has --master and --conf;
the function says `with visit.spark() as spark`.

What Java says on stderr would run through progress bars and answers. It goes into a file, which is named when something
fails and is removed when nothing does. Under spark-submit Java runs already and speaks for itself.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, ParamSpec

import typer

from sluice.cli.support.rest_client import of_queue
from sluice.cli.support.errors import (
    NOT_FOUND,
    NOT_REACHABLE,
    REFUSED,
    WRONG_COMMAND,
    Failure,
    wrong_command,
)
from sluice.cli.support.options import COMMON, Where, find_broker
from sluice.cli.support.command import Visit, registered
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sluice.spark.pipelines.queues import Queues
    from sluice.spark.pipelines.support.stream_runner import Progress

# They write a page of JSON for each mistake in SQL, which we tell in a line.
LOUD: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
# By the kinds of our own faults, which say what to do themselves.
CODES: Final = {
    "InvalidOption": WRONG_COMMAND,
    "BrokerGone": NOT_REACHABLE,
    "Refused": REFUSED,
    "DataLost": REFUSED,
}
JAVA_GONE: Final = (
    "Mostly it was killed because memory ran out: give it less to do at once, or more with --conf"
    " spark.driver.memory=4g. A stream goes on from its checkpoint."
)
PANEL: Final = "Spark"
P = ParamSpec("P")
_THROWN: Final = re.compile(
    r'^(?:Exception in thread "[^"]*" |Caused by: )?(?:[a-z][\w$]*\.)+(\w+(?:Exception|Error): .+)$'
)
INSTALL: Final = "pip install 'sluice[spark]'"
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "WARN",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",  # of the last stateful query's checkpoint for good: small is what fits most
}


Master = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="Spark's master: local[*,3] unless given, spark://HOST:7077 ...",
        rich_help_panel=PANEL,
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(
        "--conf", metavar="KEY=VALUE", help="Spark setting; can be repeated.", rich_help_panel=PANEL
    ),
]
SHARED: Final[dict[str, tuple[Any, Any]]] = {"master": (Master, ""), "conf": (Conf, None), **COMMON}


class SparkVisit(Visit):
    """A command that starts Spark."""

    def __init__(
        self,
        name: str,
        where: Where,
        as_json: bool,
        master: str = "",
        conf: list[str] | None = None,
        token_file: str = "",
    ) -> None:
        super().__init__(where, as_json)
        self._name = name
        self._token_file = token_file
        self._master = master
        self._conf = conf or []

    @property
    def queues(self) -> Queues:
        from sluice.spark import Where as DoorOf
        from sluice.spark.pipelines.queues import Queues

        token = "" if self._token_file else self.where.token
        return Queues(DoorOf(self.where.url, token, self._token_file, str(self.where.ca or "")))

    def check_queue(self, name: str) -> dict[str, Any]:
        """What is known of a queue, before Spark is started: a wrong name or address is told in a second, not after
        ten."""
        found: dict[str, Any] = self.api.get(of_queue(name))
        return found

    def describe(self, name: str) -> dict[str, Any] | None:
        """The same, or None if there is no such queue."""
        try:
            return self.check_queue(name)
        except Failure as failure:
            if failure.code != NOT_FOUND:
                raise
            return None

    def homes(self, queue: str) -> list[str]:
        """Where the dead letters of a queue lie, or those of all queues; nowhere as long as nothing has died. A wrong
        name is told."""
        if not queue:
            return [one["name"] for one in self.api.queues() if one["is_dead_letters"]]
        from sluice.spark.pipelines.support.dead_letter_queues import homes_of

        found = homes_of(queue, self.describe)
        if found is None:
            self.check_queue(queue)
        return found or []

    def is_channel(self, name: str) -> bool:
        """Whether the first death in some queue would make this one."""
        from sluice.spark.pipelines.support.dead_letter_queues import USUAL, channels

        if name.startswith(USUAL):
            return True
        return any(name in channels(self.check_queue(one["name"])) for one in self.api.queues())

    @contextmanager
    def minding(self, queue: str, group: str) -> Iterator[None]:
        """A group that this run has made keeps messages also when the run has failed: said with the failure."""
        is_new = group not in self.groups(queue)
        try:
            yield
        except SluiceError as failure:
            with suppress(Failure):
                if is_new and group in self.groups(queue):
                    left = (
                        f"The group {group} is there now and keeps what comes to {queue} for the next try;"
                        f" if there will be none: sluice group delete {queue} {group}"
                    )
                    failure.do = f"{failure.do}. {left}" if failure.do else left
            raise

    def groups(self, queue: str) -> set[str]:
        return {one["name"] for one in self.api.get(of_queue(queue, "groups"))}

    @contextmanager
    def spark(self, **more: str) -> Iterator[SparkSession]:
        """A session with the user's settings, or the one that runs already, which is then left running. Whatever goes
        wrong while it is used is told in words."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession

        from sluice.spark import session

        for name_of_logger in LOUD:
            PySparkLogger.getLogger(name_of_logger).disabled = True
        settings = {**SETTINGS, **more, **dict(_setting(one) for one in self._conf)}
        running = SparkSession.getActiveSession()
        if running is not None:
            with _in_words(None):
                yield running
            return
        log = _Log(self)
        try:
            with log:
                spark = session(f"sluice pipeline {self._name}", self._master, **settings)
        except SluiceError:
            log.remove()
            raise
        except Exception as fault:  # a master or a setting that Spark does not take, mostly
            raise _not_started(fault, log) from None
        logging.getLogger().addHandler(logging.NullHandler())  # py4j would tell of Ctrl-C with a traceback
        try:
            with _in_words(log):
                yield spark
        finally:
            with suppress(Py4JError, OSError):  # there is nobody to stop any more
                spark.stop()
        log.remove()


def pipeline(
    app: typer.Typer, name: str
) -> Callable[[Callable[Concatenate[SparkVisit, P], None]], Callable[Concatenate[SparkVisit, P], None]]:
    def begin(
        master: str,
        conf: list[str] | None,
        url: str | None,
        token: str | None,
        token_file: Path | None,
        ca: Path | None,
        json: bool,
    ) -> SparkVisit:
        need_spark()
        where = find_broker(url, token, token_file, ca)
        return SparkVisit(name, where, json, master, conf, _file_of(token, token_file))

    return registered(app, name, SHARED, begin)


def _file_of(token: str | None, token_file: Path | None) -> str:
    """The file that the token came from, if it came from one: Spark is told its name, and not what is in it, and looks
    into it anew when a token was renewed."""
    if token_file is None and not os.environ.get("SLUICE_TOKEN", "").strip():
        named = os.environ.get("SLUICE_TOKEN_FILE")
        token_file = Path(named) if named else None
    return "" if token or token_file is None else str(token_file.absolute())


def need_spark() -> None:
    """In one line what is missing, before anything is begun."""
    for module, package in (("pyspark", "PySpark"), ("pyarrow", "pyarrow"), ("deltalake", "deltalake")):
        if find_spec(module) is None:
            raise Failure(f"pipelines need {package}, which is not installed", INSTALL)
    from sluice.spark.runtime.java import find_java

    find_java()


class _Log:
    """Where Java's stderr goes: a process keeps what it is started with."""

    def __init__(self, visit: Visit) -> None:
        self.path: Path | None = None
        self._visit = visit

    def __enter__(self) -> None:
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            return
        self._visit.out.note("starting Spark ...")
        sys.stderr.flush()
        descriptor, name = tempfile.mkstemp(".log", "sluice-spark-")
        self.path = Path(name)
        self._stderr = os.dup(2)
        os.dup2(descriptor, 2)
        os.close(descriptor)

    def __exit__(self, *fault: object) -> None:
        if self.path is not None:
            os.dup2(self._stderr, 2)
            os.close(self._stderr)

    def advice(self) -> str:
        return "" if self.path is None else f"What Spark wrote is in {self.path}"

    def last_words(self) -> str:
        """Of a Java that has ended: its last exception, or what it said first that is no warning."""
        if self.path is None:
            return ""
        lines = self.path.read_text("utf-8", "replace").splitlines()
        thrown = [found[1] for line in lines if (found := _THROWN.match(line))]
        return next(iter(thrown[-1:] or [line for line in lines if line and "WARN" not in line]), "")

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _not_started(fault: Exception, log: _Log) -> Failure:
    from sluice.spark.pipelines.support.stream_runner import explained

    why = explained(fault)
    gone = "JAVA_GATEWAY_EXITED" in str(fault) or "Java gateway process exited" in str(fault)
    words = (log.last_words() if gone else "") or why.what
    return Failure(
        f"Spark cannot be started: {words}",
        ". ".join(filter(None, ("See whether --master and --conf are right", log.advice()))),
    )


@contextmanager
def _in_words(log: _Log | None) -> Iterator[None]:
    """Spark's own exceptions are pages long."""
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    from sluice.spark.errors import BrokerGone, Refused
    from sluice.spark.pipelines.support.stream_runner import StreamFailed, explained

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as fault:
        if is_java_gone(fault):
            raise Failure(
                "Java, in which Spark runs, has ended in the middle of it",
                " ".join(filter(None, (JAVA_GONE, log.advice() if log is not None else ""))),
            ) from None
        failure = explained(fault)
        if failure.kind in CODES:
            raise Failure(failure.what, failure.do, CODES[failure.kind]) from None
        if isinstance(fault, (AnalysisException, ParseException)):
            raise wrong_command(failure.what, "Mend the SQL expression") from None
        raise Failure(failure.what, failure.do or (log.advice() if log is not None else "")) from None
    except BrokerGone as fault:
        raise Failure(fault.what, fault.do, NOT_REACHABLE) from None
    except Refused as fault:
        raise Failure(fault.what, fault.do, NOT_FOUND if fault.code.startswith("unknown_") else 1) from None
    except StreamFailed as fault:
        if fault.kind in CODES:
            raise Failure(fault.what, fault.do, CODES[fault.kind]) from None
        if log is not None and not fault.do:
            fault.do = log.advice()
        raise


def is_java_gone(fault: Exception) -> bool:
    """Whether nobody answered: what Java says itself comes as a kind of its own, Py4JJavaError."""
    from py4j.protocol import Py4JError, Py4JNetworkError

    return isinstance(fault, (Py4JNetworkError, ConnectionError)) or type(fault) is Py4JError


@contextmanager
def asked_to_stop() -> Iterator[Event]:
    """Set by Ctrl-C and SIGTERM. A stream is stopped between two looks at it: an exception in the middle of a call to
    Java would leave the two with different ideas of where they are."""
    asked = Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise wrong_command(f"--conf {text!r} is not spark.KEY=VALUE", "Write it as spark.executor.memory=4g")
    return name, value


@contextmanager
def counted(visit: Visit, doing: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar that moves when it is told how many are done."""
    with visit.out.progress(total) as progress:
        task = progress.add_task(doing, total=total, rate="")
        started = time.monotonic()

        def tell(done: int) -> None:
            speed = done / max(time.monotonic() - started, 1e-6)
            progress.update(task, completed=done, rate=f"{speed:,.0f}/s")

        yield tell


@contextmanager
def at_work(visit: Visit, doing: str) -> Iterator[None]:
    """Something that moves while Spark does not tell how far it is."""
    with visit.out.working() as progress:
        progress.add_task(doing, total=None)
        yield


def speed(progress: Progress) -> str:
    return f"{progress.rows_per_second:,.0f}/s" if progress.rows >= 100 else ""


def the_only(**choices: object) -> None:
    """One of several options, and only one."""
    flags = [f"--{name.replace('_', '-')}" for name in choices]
    given = [flag for flag, value in zip(flags, choices.values()) if value]
    if len(given) != 1:
        raise wrong_command(
            f"{' and '.join(given)} exclude each other" if given else f"none of {', '.join(flags)} is given",
            f"Give one of {', '.join(flags)}",
        )


def needless(context: typer.Context, option: str, why: str, do: str) -> None:
    """An option that was given and would do nothing is refused: who gave it expects something of it."""
    source = context.get_parameter_source(option)
    if source is not None and source.name == "COMMANDLINE":
        raise wrong_command(f"--{option.replace('_', '-')} does nothing {why}", do)


def leave(code: int) -> None:
    raise typer.Exit(code)
