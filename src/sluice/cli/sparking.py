"""Spark for one command: started when everything else is known to be well, quiet, and ended with the command.

What Java says on stderr would run through progress bars and answers. It goes into a file, which is named when something
fails and is removed when nothing does. Under spark-submit Java runs already and speaks for itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Final

import typer

from sluice.cli.failures import NOT_FOUND, NOT_REACHABLE, Failure, wrong_command
from sluice.cli.remote import Visit
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sluice.spark.pipelines.queues import Queues
    from sluice.spark.pipelines.running import Progress

# They write a page of JSON for each mistake in SQL, which we tell in a line.
LOUD: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
INSTALL: Final = "pip install 'sluice[spark]'"
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "WARN",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",  # of the last stateful query's checkpoint for good: small is what fits most
}


def need_spark() -> None:
    """In one line what is missing, before anything is begun."""
    for module, package in (("pyspark", "PySpark"), ("pyarrow", "pyarrow"), ("deltalake", "deltalake")):
        if find_spec(module) is None:
            raise Failure(f"pipelines need {package}, which is not installed", INSTALL)
    from sluice.spark.java import find_java

    find_java()


def queues_of(visit: Visit) -> Queues:
    from sluice.spark import Where
    from sluice.spark.pipelines.queues import Queues

    told = visit.where
    return Queues(Where(told.url, told.token, ca=str(told.ca or "")))


@contextmanager
def spark_for(
    visit: Visit, name: str, master: str, conf: Sequence[str] | None, **more: str
) -> Iterator[SparkSession]:
    """A session with the user's settings, or the one that runs already, which is then left running. Whatever goes wrong
    while it is used is told in words."""
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    from sluice.spark import session

    for name_of_logger in LOUD:
        PySparkLogger.getLogger(name_of_logger).disabled = True
    settings = {**SETTINGS, **more, **dict(_setting(one) for one in conf or ())}
    running = SparkSession.getActiveSession()
    if running is not None:
        with _in_words(None):
            yield running
        return
    log = _Log(visit)
    with log:
        spark = session(f"sluice pipeline {name}", master, **settings)
    logging.getLogger().addHandler(logging.NullHandler())  # py4j would tell of Ctrl-C with a traceback
    try:
        with _in_words(log):
            yield spark
    finally:
        spark.stop()
    log.remove()


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

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


@contextmanager
def _in_words(log: _Log | None) -> Iterator[None]:
    """Spark's own exceptions are pages long."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    from sluice.spark.faults import BrokerGone, Refused
    from sluice.spark.pipelines.running import StreamFailed, explained

    try:
        yield
    except (AnalysisException, ParseException) as fault:
        failure = explained(fault)
        raise wrong_command(failure.what, failure.do or "Mend the SQL expression") from None
    except (PySparkException, Py4JError) as fault:
        failure = explained(fault)
        raise Failure(failure.what, failure.do or (log.advice() if log is not None else "")) from None
    except BrokerGone as fault:
        raise Failure(fault.what, fault.do, NOT_REACHABLE) from None
    except Refused as fault:
        raise Failure(fault.what, fault.do, NOT_FOUND if fault.code.startswith("unknown_") else 1) from None
    except SluiceError as fault:
        if isinstance(fault, StreamFailed) and log is not None and not fault.do:
            fault.do = log.advice()
        raise


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


def speed(progress: Progress) -> str:
    return f"{progress.rows_per_second:,.0f}/s" if progress.rows >= 100 else ""


def check_queue(visit: Visit, name: str) -> None:
    """Before Spark is started: a wrong name or address is told in a second, not after ten."""
    from sluice.cli.api import of_queue

    visit.api.get(of_queue(name))


def the_only(**choices: object) -> None:
    """One of several options, and only one."""
    flags = [f"--{name.replace('_', '-')}" for name in choices]
    given = [flag for flag, value in zip(flags, choices.values()) if value]
    if len(given) != 1:
        raise wrong_command(
            f"{' and '.join(given)} exclude each other" if given else f"none of {', '.join(flags)} is given",
            f"Give one of {', '.join(flags)}",
        )


def leave(code: int) -> None:
    raise typer.Exit(code)
