"""What the driver asks the broker before anything is read: which queues, how far they go, where to begin and to end."""

from __future__ import annotations

import logging

from sluice.spark.http.bulk_client import Door, QueueOffsets
from sluice.spark.errors import LEFT, NO_QUEUE, DataLost, InvalidOption, Refused
from sluice.spark.source.offsets import Incarnations, Sequences
from sluice.spark.source.source_options import EARLIEST, GROUP, LATEST, Positions, ReadOptions

log = logging.getLogger(__name__)

FROM_EARLIEST, FROM_LATEST = -2, -1


def chosen_queues(door: Door, options: ReadOptions) -> list[str]:
    """The queues that the options name."""
    if options.queues:
        return sorted(options.queues)
    return sorted(name for name in door.queues() if options.takes(name))


def look(door: Door, options: ReadOptions) -> dict[str, QueueOffsets]:
    """How far the queues go. One that `subscribe` names must be there."""
    found = {queue: offsets_of(door, queue) for queue in chosen_queues(door, options)}
    if not found:
        raise InvalidOption(
            f"option subscribePattern is {options.pattern!r}, and no queue at {options.where.url} is called so",
            "It must fit a whole name; `sluice queue list` shows them",
        )
    return found


def offsets_of(door: Door, queue: str) -> QueueOffsets:
    try:
        return door.offsets(queue)
    except Refused as refusal:
        if refusal.code != NO_QUEUE:
            raise
        raise InvalidOption(
            f"option subscribe names {queue!r}, and there is no such queue at {door.where.url}",
            "Publish to it or create it first, or correct the name; `sluice queue list` shows all",
        ) from None


def latest_of(found: dict[str, QueueOffsets]) -> Sequences:
    return {(queue, one.partition): one.latest for queue, seen in found.items() for one in seen.partitions}


def incarnations_of(found: dict[str, QueueOffsets]) -> Incarnations:
    return {queue: seen.incarnation for queue, seen in found.items()}


def earliest_of(found: dict[str, QueueOffsets]) -> Sequences:
    return {(queue, one.partition): one.earliest for queue, seen in found.items() for one in seen.partitions}


def starting(door: Door, options: ReadOptions, found: dict[str, QueueOffsets], cure: str = LEFT) -> Sequences:
    """Where to begin. `cure`: what to do about what a group has lost."""
    if options.starting_time is not None:
        return at_time(door, found, options.starting_time)
    if options.starting == GROUP:
        may_lose = not options.fail_on_data_loss
        return {
            (queue, partition): max(floor, seen.earliest().get(partition, 0))
            for queue, seen in found.items()
            for partition, floor in floors_of(door, queue, options.group, seen, may_lose, cure).items()
        }
    return at_positions(options.starting, found, "startingOffsets", FROM_EARLIEST)


def ending(door: Door, options: ReadOptions, found: dict[str, QueueOffsets]) -> Sequences:
    """Where to end."""
    if options.ending_time is not None:
        return at_time(door, found, options.ending_time)
    return at_positions(options.ending, found, "endingOffsets", FROM_LATEST)


def floors_of(
    door: Door, queue: str, group: str, seen: QueueOffsets, may_lose: bool = False, cure: str = LEFT
) -> dict[int, int]:
    """Where the group stands; a group that is not there yet would begin at the earliest. It stands behind what was
    taken away from it, so that whoever begins there never sees a loss: it is told here, as `DataLost`, or with
    `may_lose` as a warning."""
    try:
        standing = door.standing(queue, group)
    except Refused as refusal:
        if refusal.code != "unknown_group":
            raise
        return seen.earliest()
    tell_lost(queue, group, standing.lost, may_lose, cure)
    return standing.floors


def tell_lost(queue: str, group: str, lost: dict[int, int], may_lose: bool, cure: str) -> None:
    """What a group has lost, by partition the first sequence of it."""
    for partition, sequence in sorted(lost.items()):
        lose(
            f"partition {partition} of queue {queue!r} has lost {sequence} before Spark has read it in group"
            f" {group!r}: others have settled it for this group, or it was purged, expired or pushed out",
            may_lose,
            cure,
        )


def lose(what: str, may_lose: bool, cure: str = "") -> None:
    """Something that is to be read is gone."""
    if not may_lose:
        raise DataLost(what, cure)
    log.warning("%s; going on with what there is (failOnDataLoss=false)", what)


def at_time(door: Door, found: dict[str, QueueOffsets], seconds: float) -> Sequences:
    return {
        (queue, partition): sequence
        for queue in found
        for partition, sequence in door.offsets_at(queue, seconds).items()
    }


def at_positions(
    told: str | Positions, found: dict[str, QueueOffsets], option: str, default: int
) -> Sequences:
    """`earliest`, `latest`, or sequences as the user gave them; partitions that they do not name get `default`."""
    if isinstance(told, str):
        default, told = {EARLIEST: FROM_EARLIEST, LATEST: FROM_LATEST}[told], {}
    for queue, parts in told.items():
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
                    f"option {option} says {given} for partition {partition} of queue {queue!r}, whose latest is"
                    f" {latest}",
                    f"Give at most {latest}, or -1 for the latest",
                )
    return {
        (queue, one.partition): {FROM_EARLIEST: one.earliest, FROM_LATEST: one.latest}.get(given, given)
        for queue, seen in found.items()
        for one in seen.partitions
        for given in (told.get(queue, {}).get(one.partition, default),)
    }
