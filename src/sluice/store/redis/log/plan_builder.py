"""Builds the write plan of a frame or a snapshot, in the writer's thread."""

from __future__ import annotations

from typing import Final

from librt.strings import read_i32_le

from sluice.message import decode_body, decode_headers
from sluice.store.changes import NoteDecoder
from sluice.store.protocol import HEADER_BYTES
from sluice.store.redis.connection import Argument
from sluice.store.redis.keys import PartitionKeys, RedisKeys, entry_id, rewritten_key
from sluice.store.redis.log.address_index import AddressIndex
from sluice.store.redis.log.log_entries import FrameMessage, SplitFrame
from sluice.store.redis.log.write_plan import ScriptSteps, WritePlan

_HEADERS_SIZE_OFFSET: Final = HEADER_BYTES + 24  # offset of the size of a message's headers
# The extra fields of a dead letter's entry, which say where the message came from.
_FIELD_HEADERS: Final = (
    ("originalTopic", "originalTopic"),
    ("partitionId", "original-partition"),
    ("originalMessageId", "original-message-id"),
    ("originalQueue", "original-queue"),
    ("reason", "dead-reason"),
)


class PlanBuilder:
    def __init__(
        self,
        keys: RedisKeys,
        index: AddressIndex,
        partition_keys: PartitionKeys,
        note_decoder: NoteDecoder,
        is_cluster: bool,
    ) -> None:
        self._keys = keys
        self._index = index
        self._partition_keys = partition_keys
        self._note_decoder = note_decoder
        self._is_cluster = is_cluster

    def add_partition_names(self, plan: WritePlan) -> None:
        """Add the names of partitions that are new in this frame. Called in the loop's thread."""
        for pid in self._partition_keys.take_unsaved():
            base = self._partition_keys.base_key(pid)
            plan.log.add_command(
                "HSET", self._keys.partitions, pid, self._partition_keys.partition_name(pid)
            )
            # an incomplete frame before a crash may have left keys of this name
            if self._is_cluster:
                plan.body_steps(base).add_command("UNLINK", base)
                plan.body_steps(base).add_command("UNLINK", rewritten_key(base))

    def build_frame(
        self,
        plan: WritePlan,
        split: SplitFrame,
        address: int,
        size: int,
        is_first_of_segment: bool,
        deleted_pids: list[int],
    ) -> WritePlan:
        """Build the plan of a frame.

        `deleted_pids` are the partitions that this frame deletes.
        """
        self._add_log_entry(plan, split.log_entry, address, size, is_first_of_segment)
        self._add_bodies(plan, split.messages, address)
        for pid in deleted_pids:
            plan.log.add_command("HDEL", self._keys.partitions, pid)
            self._partition_keys.forget(pid)
        self._index.forget_partitions(set(deleted_pids))
        return plan

    def _add_log_entry(
        self, plan: WritePlan, log_entry: bytes, address: int, size: int, is_first_of_segment: bool
    ) -> None:
        """Add the log entry first: without memory Redis refuses it before any change."""
        keys = self._keys
        segment = address >> 32
        steps = ScriptSteps()
        fields: list[Argument] = ["at", address & 0xFFFF_FFFF, "size", size, "log", log_entry]
        steps.add_command("XADD", keys.segment(segment), f"{plan.frame_number}-1", *fields)
        if is_first_of_segment:
            steps.add_command("ZADD", keys.segments, segment, segment)
            steps.add_command("HSET", keys.log, "segment", segment)
        plan.log.arguments = steps.arguments + plan.log.arguments
        plan.log.keys.update(steps.keys)

    def _add_bodies(self, plan: WritePlan, messages: list[FrameMessage], address: int) -> None:
        """Add one step for each partition, and one for each dead letter, which has extra fields."""
        entries_by_partition: dict[int, list[Argument]] = {}  # ids and records, alternating
        for message in messages:
            pid = message.pid
            self._index.add(address + message.offset, pid, message.seq)
            entries = entries_by_partition.get(pid)
            if entries is None:
                entries = entries_by_partition[pid] = []
            if message.has_headers and self._note_decoder.is_queue_partition(pid):
                fields = read_dead_letter_fields(message.record)
                if fields:
                    self._add_messages(plan, pid, entries)
                    self._add_dead_letter(plan, pid, message, fields)
                    entries.clear()
                    continue
            entries += (entry_id(message.seq), message.record)
        for pid, entries in entries_by_partition.items():
            self._add_messages(plan, pid, entries)

    def _add_messages(self, plan: WritePlan, pid: int, entries: list[Argument]) -> None:
        if entries:
            base = self._partition_keys.base_key(pid)
            steps = self._body_steps(plan, base)
            steps.arguments += ["A", base, rewritten_key(base), len(entries) // 2, *entries]

    def _add_dead_letter(
        self, plan: WritePlan, pid: int, message: FrameMessage, fields: list[tuple[str, str]]
    ) -> None:
        base = self._partition_keys.base_key(pid)
        arguments = self._body_steps(plan, base).arguments
        arguments += [
            "D",
            base,
            rewritten_key(base),
            entry_id(message.seq),
            1 + 2 * len(fields),
            message.record,
        ]
        for name, value in fields:
            arguments += [name, value]

    def _body_steps(self, plan: WritePlan, base: str) -> ScriptSteps:
        steps = plan.body_steps(base)
        steps.keys[base] = None
        steps.keys[rewritten_key(base)] = None
        return steps

    def build_snapshot(
        self, state: list[bytes], freed_segments: list[int], covered_frame: int, segment: int
    ) -> WritePlan:
        """Build the plan that stores the snapshot and then deletes what it makes obsolete."""
        keys = self._keys
        plan = WritePlan()
        plan.log.add_command(
            "HSET", keys.snapshot, "covered", covered_frame, "state", b"".join(state)
        )
        plan.log.add_command("HSET", keys.log, "segment", segment)
        for number in freed_segments:
            plan.log.add_command("ZREM", keys.segments, number)
            plan.log.add_command("UNLINK", keys.segment(number))
            for pid, seqs in self._index.free_segment(number).items():
                base = self._partition_keys.base_key(pid)
                view = plan.view_steps(base)
                view.add_batched_command("XDEL", base, [], [entry_id(seq) for seq in seqs])
                view.add_batched_command("HDEL", rewritten_key(base), [], list(seqs))
        return plan


def read_dead_letter_fields(record: bytes) -> list[tuple[str, str]]:
    """Return the fields, empty if the message is no dead letter; one number tells most of them."""
    if len(record) < _HEADERS_SIZE_OFFSET + 4 or read_i32_le(record, _HEADERS_SIZE_OFFSET) <= 0:
        return []
    try:
        headers = dict(decode_headers(decode_body(record, HEADER_BYTES).headers))
    except (ValueError, IndexError, SystemError):
        # Compiled code raises SystemError for a negative size.
        return []  # not a message of a queue
    if "dead-reason" not in headers:
        return []
    return [(name, headers.get(header, "")) for name, header in _FIELD_HEADERS]
