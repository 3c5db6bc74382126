"""What a pipeline looks at before it starts Spark, so that it takes nothing that is another's, and how it says what it
refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sluice.cli.support.errors import wrong_command
from sluice.cli.pipelines.spark_command import SparkVisit
from sluice.errors import SluiceError

FLAGS: Final = {
    "group": "--group",
    "subscribe": "--queue",
    "url": "--url",
    "token": "--token",
    "tokenFile": "--token-file",
    "ca": "--ca",
}
_OPTION: Final = re.compile(rf"\b(?:the )?option ({'|'.join(FLAGS)})\b")


def own_group(visit: SparkVisit, queue: str, given: str, usual: str, checkpoint: Path) -> str:
    """The group to read as. Whoever names one knows what he does; the usual one must not be another run's."""
    from sluice.spark.pipelines.support.run_lock import check_group

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
def in_flags(anew: str = "another --checkpoint and another --group") -> Iterator[None]:
    """The source tells of its options; who gives a command has flags. `anew`: with which of them it begins anew."""
    try:
        yield
    except SluiceError as failure:
        failure.what, failure.do = (flags_for(text, anew) for text in (failure.what, failure.do))
        raise


def flags_for(text: str, anew: str) -> str:
    """Whole cures before their words: what a program does by an option, a command may do otherwise, or not at all."""
    from sluice.spark import errors

    cures = {
        errors.LEFT: (
            "Go on with what is left: --skip-lost. Messages are kept until every group has settled them, or for"
            " limits.retention"
        ),
        errors.OWN_GROUP: (
            "Give each run a --group of its own, that nobody else consumes, moves or purges. To go on with what is"
            f" left: --skip-lost, for one run; or begin anew, with {anew}"
        ),
        errors.ANEW: f"Begin anew, with {anew}",
        "; the option retrySeconds says how long to try": "",
        "failOnDataLoss=false": "--skip-lost",
        "checkpointLocation": "--checkpoint",
        "token or tokenFile": "token or --token-file",
    }
    for cure, said in cures.items():
        text = text.replace(cure, said)
    return _OPTION.sub(lambda found: FLAGS[found[1]], text)


def read_query(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as fault:
        raise wrong_command(
            f"--sql-file {file} is not UTF-8, at byte {fault.start}", "Save it as UTF-8"
        ) from None
