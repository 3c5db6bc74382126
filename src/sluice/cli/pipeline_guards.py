"""What a pipeline looks at before it starts Spark, so that it takes nothing that is another's, and how it says what it
refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.cli.failures import wrong_command
from sluice.cli.sparking import SparkVisit
from sluice.errors import SluiceError


def own_group(visit: SparkVisit, queue: str, given: str, usual: str, checkpoint: Path) -> str:
    """The group to read as. Whoever names one knows what he does; the usual one must not be another run's."""
    from sluice.spark.pipelines.alone import check_group

    if not given:
        check_group(checkpoint, usual, visit.queues.settled(queue, usual))
    return given or usual


def keep_letters(visit: SparkVisit, queue: str, settle: bool) -> None:
    """Refuse to be done with dead letters that nobody has let go."""
    if visit.check_queue(queue)["stats"]["is_dead_letters"] and not settle:
        raise wrong_command(
            f"{queue} holds dead letters, which would go once they are read",
            "Add --settle to let them go, or archive them first: `sluice pipeline archive` keeps them",
        )


@contextmanager
def in_flags() -> Iterator[None]:
    """The source tells of its options; who gives a command has flags."""
    try:
        yield
    except SluiceError as failure:
        failure.what, failure.do = (
            text.replace("failOnDataLoss=false", "--skip-lost") for text in (failure.what, failure.do)
        )
        raise


def read_query(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as fault:
        raise wrong_command(
            f"--sql-file {file} is not UTF-8, at byte {fault.start}", "Save it as UTF-8"
        ) from None
