"""Errors between Spark and the broker. Each names the option involved and a remedy."""

from __future__ import annotations

from typing import Final

from sluice.errors import SluiceError
from sluice.http_client import BrokerGone, InvalidOption, Refused

__all__ = [
    "BrokerGone",
    "DataLost",
    "InvalidOption",
    "JavaUnavailable",
    "Refused",
    "StreamCut",
]

QUEUE_RECREATED: Final = "queue_made_again"  # error codes of the API
UNKNOWN_QUEUE: Final = "unknown_queue"
START_OVER_REMEDY: Final = (
    "Start over, with a new load() or, for a stream, a new checkpointLocation;"
    " failOnDataLoss=false reads the new queue from its beginning"
)


class JavaUnavailable(SluiceError):
    """Java is missing or too old for Spark."""


class StreamCut(SluiceError):
    """A response ended early. The rows received before that are valid."""


READ_REMAINING_REMEDY: Final = (
    "Read what there is: startingOffsets earliest, or failOnDataLoss=false."
    " Messages are kept until every group has settled them, or for limits.retention"
)


OWN_GROUP_REMEDY: Final = (
    "Give each query a group of its own, which no other client consumes, moves or purges."
    " To go on with what is left: failOnDataLoss=false, for one run; or start over,"
    " with another group and a new checkpointLocation"
)


class DataLost(SluiceError):
    """Sequences that Spark needs are no longer stored."""

    def __init__(self, resource: str, remedy: str = "") -> None:
        super().__init__(
            resource,
            remedy
            or "Messages are kept until every group has settled them: give the stream a group of"
            " its own (option group). To go on with what is left: failOnDataLoss=false",
        )
