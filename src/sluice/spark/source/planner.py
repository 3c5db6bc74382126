"""The driver's requests before a read: which queues, their offsets, where to begin and to end."""

from __future__ import annotations

import logging

from sluice.spark.errors import (
    READ_REMAINING_REMEDY,
    UNKNOWN_QUEUE,
    DataLost,
    InvalidOption,
    Refused,
)
from sluice.spark.http import BulkClient, QueueOffsets
from sluice.spark.source.offsets import Incarnations, Sequences
from sluice.spark.source.source_options import EARLIEST, GROUP, LATEST, Positions, ReadOptions

log = logging.getLogger(__name__)

FROM_EARLIEST, FROM_LATEST = -2, -1


def select_queues(client: BulkClient, options: ReadOptions) -> list[str]:
    """Return the names of the queues that the options select."""
    if options.queues:
        return sorted(options.queues)
    return sorted(name for name in client.queues() if options.matches(name))


def find_offsets(client: BulkClient, options: ReadOptions) -> dict[str, QueueOffsets]:
    """Return the offsets of the selected queues. A queue named by `subscribe` must exist."""
    found = {queue: queue_offsets(client, queue) for queue in select_queues(client, options)}
    if not found:
        raise InvalidOption(
            f"option subscribePattern is {options.pattern!r},"
            f" and no queue at {options.where.url} matches it",
            "It must match a whole name; `sluice queue list` shows all names",
        )
    return found


def queue_offsets(client: BulkClient, queue: str) -> QueueOffsets:
    try:
        return client.offsets(queue)
    except Refused as refusal:
        if refusal.code != UNKNOWN_QUEUE:
            raise
        raise InvalidOption(
            f"option subscribe names {queue!r}, and there is no such queue at {client.where.url}",
            "Publish to it or create it first, or correct the name; `sluice queue list` shows all",
        ) from None


def latest_sequences(found: dict[str, QueueOffsets]) -> Sequences:
    return {
        (queue, one.partition): one.latest
        for queue, seen in found.items()
        for one in seen.partitions
    }


def incarnations_of(found: dict[str, QueueOffsets]) -> Incarnations:
    return {queue: seen.incarnation for queue, seen in found.items()}


def earliest_sequences(found: dict[str, QueueOffsets]) -> Sequences:
    return {
        (queue, one.partition): one.earliest
        for queue, seen in found.items()
        for one in seen.partitions
    }


def starting_sequences(
    client: BulkClient,
    options: ReadOptions,
    found: dict[str, QueueOffsets],
    remedy: str = READ_REMAINING_REMEDY,
) -> Sequences:
    """Return where to begin. `remedy`: what to do about losses of a group, for the error."""
    if options.starting_time is not None:
        return sequences_at_time(client, found, options.starting_time)
    if options.starting == GROUP:
        allow_loss = not options.fail_on_data_loss
        return {
            (queue, partition): max(low_watermark, seen.earliest().get(partition, 0))
            for queue, seen in found.items()
            for partition, low_watermark in group_low_watermarks(
                client, queue, options.group, seen, allow_loss, remedy
            ).items()
        }
    return sequences_at_positions(options.starting, found, "startingOffsets", FROM_EARLIEST)


def ending_sequences(
    client: BulkClient, options: ReadOptions, found: dict[str, QueueOffsets]
) -> Sequences:
    """Return where to end."""
    if options.ending_time is not None:
        return sequences_at_time(client, found, options.ending_time)
    return sequences_at_positions(options.ending, found, "endingOffsets", FROM_LATEST)


def group_low_watermarks(
    client: BulkClient,
    queue: str,
    group: str,
    seen: QueueOffsets,
    allow_loss: bool = False,
    remedy: str = READ_REMAINING_REMEDY,
) -> dict[int, int]:
    """Return the low watermarks of the group; a group that does not exist would begin at the
    earliest.

    The low watermark is beyond messages that were removed from the group, so a reader that begins
    there would not notice a loss. This function reports it: as `DataLost`, or with `allow_loss` as
    a warning.
    """
    try:
        progress = client.group_progress(queue, group)
    except Refused as refusal:
        if refusal.code != "unknown_group":
            raise
        return seen.earliest()
    report_lost_ranges(queue, group, progress.lost, allow_loss, remedy)
    return progress.low_watermarks


def report_lost_ranges(
    queue: str, group: str, lost: dict[int, int], allow_loss: bool, remedy: str
) -> None:
    """Report the losses of a group; `lost` is the first lost sequence by partition."""
    for partition, sequence in sorted(lost.items()):
        report_loss(
            f"partition {partition} of queue {queue!r} has lost {sequence} before Spark has read it"
            f" in group {group!r}: others have settled it for this group, or it was purged, expired"
            " or pushed out",
            allow_loss,
            remedy,
        )


def report_loss(what: str, allow_loss: bool, remedy: str = "") -> None:
    """Raise DataLost, or log a warning if losses are allowed."""
    if not allow_loss:
        raise DataLost(what, remedy)
    log.warning("%s; going on with what there is (failOnDataLoss=false)", what)


def sequences_at_time(
    client: BulkClient, found: dict[str, QueueOffsets], seconds: float
) -> Sequences:
    return {
        (queue, partition): sequence
        for queue in found
        for partition, sequence in client.offsets_at(queue, seconds).items()
    }


def sequences_at_positions(
    positions: str | Positions, found: dict[str, QueueOffsets], option: str, default: int
) -> Sequences:
    """Return `earliest`, `latest`, or the sequences that the user gave. Unnamed partitions get
    `default`.
    """
    if isinstance(positions, str):
        default, positions = {EARLIEST: FROM_EARLIEST, LATEST: FROM_LATEST}[positions], {}
    for queue, parts in positions.items():
        if queue not in found:
            raise InvalidOption(
                f"option {option} names queue {queue!r}, which is not read",
                f"Queues that are read: {', '.join(found)}",
            )
        beyond = sorted(parts.keys() - found[queue].latest().keys())
        if beyond:
            raise InvalidOption(
                f"option {option} names partition {beyond[0]} of queue {queue!r}",
                f"It has {len(found[queue].partitions)}, from 0 on",
            )
        for partition, latest in found[queue].latest().items():
            given = parts.get(partition, 0)
            if given > latest:
                raise InvalidOption(
                    f"option {option} says {given} for partition {partition} of queue {queue!r},"
                    f" whose latest is {latest}",
                    f"Give at most {latest}, or -1 for the latest",
                )
    return {
        (queue, one.partition): {FROM_EARLIEST: one.earliest, FROM_LATEST: one.latest}.get(
            given, given
        )
        for queue, seen in found.items()
        for one in seen.partitions
        for given in (positions.get(queue, {}).get(one.partition, default),)
    }
