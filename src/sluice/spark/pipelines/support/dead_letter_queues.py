"""Where the dead letters of a queue lie. Its configuration says so (`dlq_config.topic`, `invalid_topic`), not its name
alone, and several queues may share a place: what died in another queue is not this one's.

Knows no door: `describe` gives what REST tells of a queue (`GET /queues/{name}`), or None if there is no such queue.
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
    """Where a queue sends its dead and its invalid messages, whether anything has gone there yet or not."""
    name = description["stats"]["name"]
    named = (
        description["stats"]["dlq"],
        description["config"]["dlq_config"].get("invalid_topic") or "",
    )
    return list(dict.fromkeys(one for one in named if one and one != name))


def find_dead_letter_queues(queue: str, describe: DescribeQueue) -> list[str] | None:
    """The queues with the dead letters of `queue`, of those that are there: the first death makes one. None if there is
    no such queue; of one that was deleted, its letters may be left."""
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
    """Only those of one queue. What was published to its dead-letter queue without having died is taken for one too."""
    from pyspark.sql import functions as f

    origin = f.col("original_queue")
    return dead_letters.where(
        (origin == queue) | (origin.isNull() & (f.col("queue") == f.lit(DEFAULT_PREFIX + queue)))
    )
