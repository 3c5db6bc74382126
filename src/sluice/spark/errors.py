"""What can go wrong between Spark and the broker, told with the option that it hangs on and the cure."""

from __future__ import annotations

from typing import Any, Final

from sluice.errors import ConfigError, SluiceError

QUEUE_RECREATED: Final = "queue_made_again"  # codes of refusals
UNKNOWN_QUEUE: Final = "unknown_queue"
START_OVER_REMEDY: Final = (
    "Begin anew, with a new load() or, for a stream, a new checkpointLocation; failOnDataLoss=false reads the new queue"
    " from its beginning"
)


class InvalidOption(ConfigError):
    """An option, or a column, that cannot be used as it is."""


class JavaUnavailable(SluiceError):
    """Spark runs on Java, and there is none, or one that is too old."""


class Refused(SluiceError):
    """The broker has answered, and says no. `code` is for programs: unknown_queue, out_of_range, stale_batch."""

    def __init__(
        self, code: str, resource: str, remedy: str, facts: dict[str, Any] | None = None
    ) -> None:
        super().__init__(resource, remedy)
        self.code = code
        self.facts = facts or {}


class BrokerGone(SluiceError):
    """It was asked again and again, and nobody answered."""

    def __init__(self, url: str, seconds: float, reason: str) -> None:
        super().__init__(
            f"the broker at {url} did not answer for {seconds:.0f} s ({reason})",
            "Start it, or correct the option url; the option retrySeconds says how long to try. A stream goes on from"
            " its checkpoint when it is started again",
        )


class StreamCut(SluiceError):
    """An answer that stopped in its middle; what was whole of it is good."""


READ_REMAINING_REMEDY: Final = (
    "Read what there is: startingOffsets earliest, or failOnDataLoss=false. Messages are kept until every group has"
    " settled them, or for limits.retention"
)


OWN_GROUP_REMEDY: Final = (
    "Give each query a group of its own, that nobody else consumes, moves or purges. To go on with what is left:"
    " failOnDataLoss=false, for one run; or begin anew, with another group and a new checkpointLocation"
)


class DataLost(SluiceError):
    """Sequences that Spark is to read are not kept any more."""

    def __init__(self, resource: str, remedy: str = "") -> None:
        super().__init__(
            resource,
            remedy
            or "Messages are kept until every group has settled them: give the stream a group of its own (option"
            " group). To go on with what is left: failOnDataLoss=false",
        )
