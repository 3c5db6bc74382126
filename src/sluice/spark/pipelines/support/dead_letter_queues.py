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

USUAL: Final = "dlq/"
Describe = Callable[[str], Mapping[str, Any] | None]


def channels(told: Mapping[str, Any]) -> list[str]:
    """Where a queue sends its dead and its invalid messages, whether anything has gone there yet or not."""
    name = told["stats"]["name"]
    named = (told["stats"]["dlq"], told["config"]["dlq_config"].get("invalid_topic") or "")
    return list(dict.fromkeys(one for one in named if one and one != name))


def homes_of(queue: str, describe: Describe) -> list[str] | None:
    """The queues with the dead letters of `queue`, of those that are there: the first death makes one. None if there is
    no such queue; of one that was deleted, its letters may be left."""
    if queue.startswith(USUAL):
        raise InvalidOption(
            f"{queue} holds dead letters", f"Name the queue whose messages died: {queue.removeprefix(USUAL)}"
        )
    told = describe(queue)
    if told is None:
        return [USUAL + queue] if describe(USUAL + queue) is not None else None
    found = [one for one in channels(told) if describe(one) is not None]
    if not found and told["stats"]["is_dead_letters"]:
        raise InvalidOption(
            f"{queue} holds dead letters", "Name the queue whose messages died: their original_queue"
        )
    return found


def own(letters: DataFrame, queue: str) -> DataFrame:
    """Only those of one queue. What was published to its dead-letter queue without having died is taken for one too."""
    from pyspark.sql import functions as f

    origin = f.col("original_queue")
    return letters.where((origin == queue) | (origin.isNull() & (f.col("queue") == f.lit(USUAL + queue))))
