"""Takeover of a store in a Cluster: fences out previous owners and removes incomplete frames.

A frame exists when the log has it. Bodies are written before the log, so a crash between the two
leaves entries above the end of the log. They are removed before the first new frame: its messages
get the same sequences, and the entries must not be taken for them.
"""

from __future__ import annotations

from sluice.store.protocol import RecoveryReport
from sluice.store.redis.connection import Argument, Command, RedisChannel
from sluice.store.redis.keys import PartitionKeys, RedisKeys, entry_id
from sluice.store.redis.log.address_index import AddressIndex
from sluice.store.redis.log.write_plan import (
    MAX_COMMAND_ARGUMENTS,
    ScriptSteps,
    make_stamp,
    partition_write_command,
)

_BATCH_SIZE = 256  # partitions in one request


def raise_fences(channel: RedisChannel, keys: RedisKeys, token: int) -> None:
    """Raise the fence of every partition, before any of its data is read."""
    names = channel.execute([(keys.log, ["HGETALL", keys.partitions])])[0]
    bases = [
        keys.base_key(bytes(name).decode(), int(pid)) for pid, name in zip(names[::2], names[1::2])
    ]
    for start in range(0, len(bases), _BATCH_SIZE):
        batch = bases[start : start + _BATCH_SIZE]
        channel.execute(
            [
                (base, partition_write_command(base, ScriptSteps(), token, make_stamp(token, 0)))
                for base in batch
            ]
        )


def remove_torn_entries(
    channel: RedisChannel,
    partition_keys: PartitionKeys,
    index: AddressIndex,
    token: int,
    report: RecoveryReport,
) -> None:
    """Remove entries above the log's end, so that the stream accepts their ids again."""
    partitions = partition_keys.all_base_keys()
    for start in range(0, len(partitions), _BATCH_SIZE):
        batch = partitions[start : start + _BATCH_SIZE]
        commands: list[tuple[str, Command]] = [
            (base, ["XRANGE", base, f"{index.highest_seq(pid) + 1}-0", "+"]) for pid, base in batch
        ]
        for (pid, base), entries in zip(batch, channel.execute(commands)):
            if entries:
                report.torn_bytes += sum(len(fields[1]) for _, fields in entries)
                _remove_entries(
                    channel,
                    base,
                    [bytes(entry) for entry, _ in entries],
                    index.highest_seq(pid),
                    token,
                )


def _remove_entries(
    channel: RedisChannel, base: str, entries: list[Argument], highest_seq: int, token: int
) -> None:
    for write_number, start in enumerate(range(0, len(entries), MAX_COMMAND_ARGUMENTS), 1):
        steps = ScriptSteps()
        steps.add_command("XDEL", base, *entries[start : start + MAX_COMMAND_ARGUMENTS])
        steps.add_optional_command(
            base, "XSETID", base, entry_id(highest_seq) if highest_seq >= 0 else "0-0"
        )
        channel.execute(
            [(base, partition_write_command(base, steps, token, make_stamp(token, write_number)))]
        )
