"""Find the dead-letter queues of a queue.

Its configuration names them (`dlq_config.topic`, `invalid_topic`), and several queues may share
one: dead letters of another queue are filtered out.

The module does no I/O: `describe` returns what REST returns for a queue (`GET /queues/{name}`), or
None if it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sluice.spark.errors import InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DEFAULT_PREFIX: Final = "dlq/"
DescribeQueue = Callable[[str], Mapping[str, Any] | None]


def dead_letter_targets(description: Mapping[str, Any]) -> list[str]:
    """Return where a queue sends its dead letters and invalid messages, whether these queues exist
    or not.
    """
    name = description["stats"]["name"]
    named = (
        description["stats"]["dlq"],
        description["config"]["dlq_config"].get("invalid_topic") or "",
    )
    return list(dict.fromkeys(one for one in named if one and one != name))


def find_dead_letter_queues(queue: str, describe: DescribeQueue) -> list[str] | None:
    """Return the existing dead-letter queues of `queue`; its first dead letter creates one.

    None if there is no such queue. The dead letters of a deleted queue may remain.
    """
    if queue.startswith(DEFAULT_PREFIX):
        raise InvalidOption(
            f"{queue} holds dead letters",
            f"Name the queue whose messages died: {queue.removeprefix(DEFAULT_PREFIX)}",
        )
    description = describe(queue)
    if description is None:
        return [DEFAULT_PREFIX + queue] if describe(DEFAULT_PREFIX + queue) is not None else None
    found = [one for one in dead_letter_targets(description) if describe(one) is not None]
    if not found and description["stats"]["is_dead_letters"]:
        raise InvalidOption(
            f"{queue} holds dead letters",
            "Name the queue whose messages died: their original_queue",
        )
    return found


def only_from_queue(dead_letters: DataFrame, queue: str) -> DataFrame:
    """Keep the dead letters of one queue. A message that was published to its dead-letter queue
    directly counts as one.
    """
    from pyspark.sql import functions as f

    origin = f.col("original_queue")
    return dead_letters.where(
        (origin == queue) | (origin.isNull() & (f.col("queue") == f.lit(DEFAULT_PREFIX + queue)))
    )
