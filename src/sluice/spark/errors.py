"""Errors between Spark and the broker. Each names the option involved and a remedy."""

from __future__ import annotations

from typing import Any, Final

from sluice.errors import ConfigError, SluiceError

QUEUE_RECREATED: Final = "queue_made_again"  # error codes of the API
UNKNOWN_QUEUE: Final = "unknown_queue"
START_OVER_REMEDY: Final = (
    "Start over, with a new load() or, for a stream, a new checkpointLocation;"
    " failOnDataLoss=false reads the new queue from its beginning"
)


class InvalidOption(ConfigError):
    """An option or a column is invalid."""


class JavaUnavailable(SluiceError):
    """Java is missing or too old for Spark."""


class Refused(SluiceError):
    """The broker refused a request. `code` is for programs: unknown_queue, out_of_range,
    stale_batch.
    """

    def __init__(
        self, code: str, resource: str, remedy: str, facts: dict[str, Any] | None = None
    ) -> None:
        super().__init__(resource, remedy)
        self.code = code
        self.facts = facts or {}


class BrokerGone(SluiceError):
    """The broker did not answer any attempt."""

    def __init__(self, url: str, seconds: float, reason: str) -> None:
        super().__init__(
            f"the broker at {url} did not answer for {seconds:.0f} s ({reason})",
            "Start it, or correct the option url; the option retrySeconds says how long to try."
            " A stream goes on from its checkpoint when it is started again",
        )


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
