"""Spark for one command: started after all checks, quiet, and stopped with the command.

`@pipeline_command(app, "archive")` registers a command with --master and --conf, whose first
parameter is a `SparkCommandContext`; the function uses `with cli.spark() as spark`.

Java's stderr would disturb progress bars and results. It goes to a file, which an error names and a
success removes. Under spark-submit Java is already running and keeps its stderr.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
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

from sluice.cli.support import (
    COMMON_OPTIONS,
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    CommandContext,
    CommandError,
    find_broker,
    queue_path,
    register_command,
    usage_error,
)
from sluice.errors import SluiceError
from sluice.http_client import Endpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sluice.spark.pipelines.queues import Queues
    from sluice.spark.pipelines.support.stream_runner import StreamProgress

# They print a page of JSON for each mistake in SQL, which we report in a line.
NOISY_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
# By class name of our own errors, which contain a remedy.
EXIT_CODES_BY_ERROR: Final = {
    "InvalidOption": EXIT_USAGE,
    "BrokerGone": EXIT_UNREACHABLE,
    "Refused": EXIT_FAILED,
    "DataLost": EXIT_FAILED,
}
# By the exit status of Java's process; negative: the signal that killed it.
JAVA_EXIT_CAUSES: Final = {
    -signal.SIGKILL: "It was killed, mostly because memory ran out: give it less to do at once, or"
    " more with --conf spark.driver.memory=4g",
    56: "Its executor and its driver lost each other, as after a long pause of the machine: start"
    " the command again",
}
JAVA_EXIT_SECONDS: Final = 5.0  # until the process of a broken connection has ended
PANEL: Final = "Spark"
P = ParamSpec("P")
_JAVA_EXCEPTION: Final = re.compile(
    r'^(?:Exception in thread "[^"]*" |Caused by: )?(?:[a-z][\w$]*\.)+(\w+(?:Exception|Error): .+)$'
)
INSTALL: Final = "pip install 'sluice[spark]'"
# 8 shuffle partitions: the checkpoint of a stateful query fixes the number forever, and a small one
# fits most.
SPARK_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "WARN",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
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
SHARED_OPTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "master": (Master, ""),
    "conf": (Conf, None),
    **COMMON_OPTIONS,
}


class SparkCommandContext(CommandContext):
    """A command that starts Spark."""

    def __init__(
        self,
        name: str,
        broker: Endpoint,
        as_json: bool,
        master: str = "",
        conf: list[str] | None = None,
    ) -> None:
        super().__init__(broker, as_json)
        self._name = name
        self._master = master
        self._conf = conf or []

    @property
    def queues(self) -> Queues:
        from sluice.spark.pipelines.queues import Queues

        return Queues(self.broker)

    def check_queue(self, name: str) -> dict[str, Any]:
        """Return the description of a queue. Finds wrong names before Spark starts."""
        found: dict[str, Any] = self.api.get(queue_path(name))
        return found

    def describe(self, name: str) -> dict[str, Any] | None:
        """Return the description of a queue, or None if there is no such queue."""
        try:
            return self.check_queue(name)
        except CommandError as failure:
            if failure.code != EXIT_NOT_FOUND:
                raise
            return None

    def dead_letter_queues(self, queue: str) -> list[str]:
        """Return the dead-letter queues of a queue, or of all queues; none if no message has died.

        Raises for a wrong name.
        """
        if not queue:
            return [one["name"] for one in self.api.queues() if one["is_dead_letters"]]
        from sluice.spark.pipelines.support.dead_letter_queues import find_dead_letter_queues

        found = find_dead_letter_queues(queue, self.describe)
        if found is None:
            self.check_queue(queue)
        return found or []

    def is_dead_letter_target(self, name: str) -> bool:
        """Return whether the first dead letter of some queue would create this one."""
        from sluice.spark.pipelines.support.dead_letter_queues import (
            DEFAULT_PREFIX,
            dead_letter_targets,
        )

        if name.startswith(DEFAULT_PREFIX):
            return True
        return any(
            name in dead_letter_targets(self.check_queue(one["name"])) for one in self.api.queues()
        )

    @contextmanager
    def warn_about_new_group(self, queue: str, group: str) -> Iterator[None]:
        """Add a warning to a failure: a group that this run created keeps messages from being
        deleted.
        """
        is_new = group not in self.groups(queue)
        try:
            yield
        except SluiceError as failure:
            with suppress(CommandError):
                if is_new and group in self.groups(queue):
                    warning = (
                        f"The group {group} exists now and keeps new messages of {queue} for the"
                        f" next try; if there will be none: sluice group delete {queue} {group}"
                    )
                    failure.remedy = f"{failure.remedy}. {warning}" if failure.remedy else warning
            raise

    def groups(self, queue: str) -> set[str]:
        return {one["name"] for one in self.api.get(queue_path(queue, "groups"))}

    @contextmanager
    def spark(self, **more: str) -> Iterator[SparkSession]:
        """Start a session with the user's settings, or use the running one, which is then left
        running.

        Errors of Spark become short messages.
        """
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession

        from sluice.spark import session

        for logger_name in NOISY_LOGGERS:
            PySparkLogger.getLogger(logger_name).disabled = True
        settings = {**SPARK_SETTINGS, **more, **dict(_parse_setting(one) for one in self._conf)}
        active_session = SparkSession.getActiveSession()
        if active_session is not None:
            with _explain_errors(None):
                yield active_session
            return
        log = _JavaLog(self)
        try:
            with log:
                spark = session(f"sluice pipeline {self._name}", self._master, **settings)
        except SluiceError:
            log.remove()
            raise
        except Exception as fault:  # mostly an invalid master or setting
            raise _start_error(fault, log) from None
        # Otherwise py4j prints a traceback on Ctrl-C.
        logging.getLogger().addHandler(logging.NullHandler())
        try:
            with _explain_errors(log):
                yield spark
        finally:
            with suppress(Py4JError, OSError):  # Java may have ended already
                spark.stop()
        log.remove()


def pipeline_command(
    app: typer.Typer, name: str
) -> Callable[
    [Callable[Concatenate[SparkCommandContext, P], None]],
    Callable[Concatenate[SparkCommandContext, P], None],
]:
    def begin(
        master: str,
        conf: list[str] | None,
        url: str | None,
        token: str | None,
        token_file: Path | None,
        ca: Path | None,
        json: bool,
    ) -> SparkCommandContext:
        check_spark_installed()
        broker = find_broker(url, token, token_file, ca)
        return SparkCommandContext(name, broker, json, master, conf)

    return register_command(app, name, SHARED_OPTIONS, begin)


def check_spark_installed() -> None:
    """Raise for the first missing package, or for missing Java, before any work begins."""
    for module, package in (
        ("pyspark", "PySpark"),
        ("pyarrow", "pyarrow"),
        ("deltalake", "deltalake"),
    ):
        if find_spec(module) is None:
            raise CommandError(f"pipelines need {package}, which is not installed", INSTALL)
    from sluice.spark.runtime import find_java

    find_java()


class _JavaLog:
    """Redirects Java's stderr to a file: a process keeps the stderr that it was started with."""

    def __init__(self, cli: CommandContext) -> None:
        self.path: Path | None = None
        self._cli = cli

    def __enter__(self) -> None:
        if "PYSPARK_GATEWAY_PORT" in os.environ:
            return
        self._cli.out.note("starting Spark ...")
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

    def remedy(self) -> str:
        return "" if self.path is None else f"What Spark wrote is in {self.path}"

    def last_error(self) -> str:
        """Return the last exception of a Java process that ended, or its first output that is no
        warning.
        """
        if self.path is None:
            return ""
        lines = self.path.read_text("utf-8", "replace").splitlines()
        thrown = [found[1] for line in lines if (found := _JAVA_EXCEPTION.match(line))]
        return next(
            iter(thrown[-1:] or [line for line in lines if line and "WARN" not in line]), ""
        )

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _start_error(fault: Exception, log: _JavaLog) -> CommandError:
    from sluice.spark.pipelines.support.stream_runner import explain_error

    why = explain_error(fault)
    gone = "JAVA_GATEWAY_EXITED" in str(fault) or "Java gateway process exited" in str(fault)
    message = (log.last_error() if gone else "") or why.what
    return CommandError(
        f"Spark cannot be started: {message}",
        ". ".join(filter(None, ("See whether --master and --conf are right", log.remedy()))),
    )


def _java_exit_remedy() -> str:
    """Return why Java has ended, as far as its exit status tells, and what to do."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)  # under spark-submit there is none
    try:
        status: int | None = None if process is None else process.wait(JAVA_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    cause = "Start the command again"
    if status is not None:
        cause = JAVA_EXIT_CAUSES.get(status, f"Its exit status is {status}")
    return f"{cause}. A stream goes on from its checkpoint."


@contextmanager
def _explain_errors(log: _JavaLog | None) -> Iterator[None]:
    """Turn Spark's exceptions, which are pages long, into short errors."""
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    from sluice.spark.errors import BrokerGone, Refused
    from sluice.spark.pipelines.support.stream_runner import StreamFailed, explain_error

    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as fault:
        if has_java_exited(fault):
            raise CommandError(
                "Java, in which Spark runs, has ended in the middle of it",
                " ".join(
                    filter(None, (_java_exit_remedy(), log.remedy() if log is not None else ""))
                ),
            ) from None
        failure = explain_error(fault)
        if failure.kind in EXIT_CODES_BY_ERROR:
            raise CommandError(
                failure.what, failure.remedy, EXIT_CODES_BY_ERROR[failure.kind]
            ) from None
        if isinstance(fault, (AnalysisException, ParseException)):
            raise usage_error(failure.what, "Correct the SQL expression") from None
        raise CommandError(
            failure.what, failure.remedy or (log.remedy() if log is not None else "")
        ) from None
    except BrokerGone as fault:
        raise CommandError(fault.what, fault.remedy, EXIT_UNREACHABLE) from None
    except Refused as fault:
        raise CommandError(
            fault.what, fault.remedy, EXIT_NOT_FOUND if fault.code.startswith("unknown_") else 1
        ) from None
    except StreamFailed as fault:
        if fault.kind in EXIT_CODES_BY_ERROR:
            raise CommandError(fault.what, fault.remedy, EXIT_CODES_BY_ERROR[fault.kind]) from None
        if log is not None and not fault.remedy:
            fault.remedy = log.remedy()
        raise


def has_java_exited(fault: Exception) -> bool:
    """Return whether Java did not answer: its own exceptions are Py4JJavaError."""
    from py4j.protocol import Py4JError, Py4JNetworkError

    return isinstance(fault, (Py4JNetworkError, ConnectionError)) or type(fault) is Py4JError


@contextmanager
def stop_on_signal() -> Iterator[Event]:
    """Set an event on Ctrl-C and SIGTERM.

    The stream is stopped between two polls: an exception in the middle of a call to Java would
    leave the two processes with different states.
    """
    stop_requested = Event()

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop_requested.set()

    previous_handlers = {
        number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop_requested
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _parse_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise usage_error(
            f"--conf {text!r} is not spark.KEY=VALUE", "Write it as spark.executor.memory=4g"
        )
    return name, value


@contextmanager
def progress_bar(
    cli: CommandContext, action: str, total: int | None
) -> Iterator[Callable[[int], None]]:
    """Show a bar; the yielded function sets how many items are done."""
    with cli.out.progress(total) as progress:
        task = progress.add_task(action, total=total, rate="")
        started = time.monotonic()

        def update(done: int) -> None:
            speed = done / max(time.monotonic() - started, 1e-6)
            progress.update(task, completed=done, rate=f"{speed:,.0f}/s")

        yield update


@contextmanager
def spinner(cli: CommandContext, action: str) -> Iterator[None]:
    """Show a spinner while the progress of Spark is unknown."""
    with cli.out.spinner() as progress:
        progress.add_task(action, total=None)
        yield


def speed(progress: StreamProgress) -> str:
    return f"{progress.rows_per_second:,.0f}/s" if progress.rows >= 100 else ""


def require_exactly_one(**choices: object) -> None:
    """Require exactly one of several options."""
    flags = [f"--{name.replace('_', '-')}" for name in choices]
    given = [flag for flag, value in zip(flags, choices.values()) if value]
    if len(given) != 1:
        raise usage_error(
            f"{' and '.join(given)} exclude each other"
            if given
            else f"none of {', '.join(flags)} is given",
            f"Give one of {', '.join(flags)}",
        )


def reject_unused(context: typer.Context, option: str, why: str, do: str) -> None:
    """Refuse an option that was given and would have no effect."""
    source = context.get_parameter_source(option)
    if source is not None and source.name == "COMMANDLINE":
        raise usage_error(f"--{option.replace('_', '-')} does nothing {why}", do)


def exit_with(code: int) -> None:
    raise typer.Exit(code)
