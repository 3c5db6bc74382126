"""Checks of a pipeline before it starts Spark, and errors in terms of the command line.

The checks ensure that a run does not take messages of another run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.cli.pipelines.spark_command import SparkCommandContext
from sluice.cli.support import (
    name_flags,
    usage_error,
)
from sluice.errors import SluiceError


def choose_group(
    cli: SparkCommandContext, queue: str, given: str, default: str, checkpoint: Path
) -> str:
    """Return the group to read as. An explicit name is accepted; the default must not be in use by
    another run.
    """
    from sluice.spark.pipelines.support.run_lock import check_group_unused

    if not given:
        check_group_unused(checkpoint, default, cli.queues.settled_count(queue, default))
    return given or default


def check_dead_letters(cli: SparkCommandContext, queue: str, settle: bool) -> None:
    """Refuse to settle dead letters without --settle."""
    if cli.check_queue(queue)["stats"]["is_dead_letters"] and not settle:
        raise usage_error(
            f"{queue} holds dead letters, which would be deleted once they are read",
            "Add --settle to delete them, or archive them first:"
            " `sluice pipeline archive` keeps them",
        )


@contextmanager
def translate_options(
    start_over: str = "another --checkpoint and another --group",
) -> Iterator[None]:
    """Rename options in errors of the data source to flags of the command. `start_over`: flags with
    which to start over.
    """
    try:
        yield
    except SluiceError as failure:
        failure.what, failure.remedy = (
            replace_options(text, start_over) for text in (failure.what, failure.remedy)
        )
        raise


def replace_options(text: str, start_over: str) -> str:
    """Replace whole remedies first, then single options: a command may lack what an option does."""
    from sluice.spark import errors

    replacements = {
        errors.READ_REMAINING_REMEDY: (
            "Go on with what is left: --skip-lost."
            " Messages are kept until every group has settled them, or for limits.retention"
        ),
        errors.OWN_GROUP_REMEDY: (
            "Give each run a --group of its own, which no other client consumes, moves or purges."
            " To go on with what is left: --skip-lost, for one run;"
            f" or start over, with {start_over}"
        ),
        errors.START_OVER_REMEDY: f"Start over, with {start_over}",
        "; the option retrySeconds says how long to try": "",
        "failOnDataLoss=false": "--skip-lost",
        "checkpointLocation": "--checkpoint",
        "token or tokenFile": "token or --token-file",
    }
    for old_text, new_text in replacements.items():
        text = text.replace(old_text, new_text)
    return name_flags(text)


def read_query(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as fault:
        raise usage_error(
            f"--sql-file {file} is not UTF-8, at byte {fault.start}", "Save it as UTF-8"
        ) from None
