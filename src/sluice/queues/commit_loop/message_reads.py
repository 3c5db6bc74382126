"""Reads of stored messages for callers outside the engine, which know where the messages are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sluice.message import Message
from sluice.queues.commit_loop.loop import CommitLoop
from sluice.queues.model import NO_ADDRESS, Partition


def read_messages(
    commit_loop: CommitLoop,
    locations: list[tuple[Partition, int]],
    done: Callable[[list[Message | None]], None],
) -> None:
    """Read the stored messages at these locations; None for deleted or damaged ones.

    Cached bodies need no read.
    """
    found: list[Message | None] = []
    missing: list[int] = []
    addresses: list[int] = []
    for nth, (partition, seq) in enumerate(locations):
        message = partition.cached_bodies.get(seq)
        found.append(message)
        address = partition.address(seq)
        if message is None and address != NO_ADDRESS:
            missing.append(nth)
            addresses.append(int(address))
    if missing:
        commit_loop.read(addresses, partial(_on_read, commit_loop, found, missing, done))
    else:
        done(found)


def _on_read(
    commit_loop: CommitLoop,
    found: list[Message | None],
    missing: list[int],
    done: Callable[[list[Message | None]], None],
    records: list[bytes | None],
) -> None:
    for nth, data in zip(missing, records, strict=True):
        found[nth] = None if data is None else commit_loop.engine.decode_message(data)
    done(found)
