"""What a frame, or a snapshot, becomes: commands, sorted by where they go. Made in the writer's thread."""

from __future__ import annotations

from sluice.store.changes import Meaning
from sluice.store.redis.log.log_entries import Parts, Piece
from sluice.store.redis.log.address_index import Index
from sluice.store.redis.keys import Keys, again, entry_id
from sluice.store.redis.views.dead_letter_fields import fields_of
from sluice.store.redis.connection import Word
from sluice.store.redis.partition_keys import Places
from sluice.store.redis.log.write_plan import Plan, Steps


class Composer:
    def __init__(self, keys: Keys, index: Index, places: Places, meaning: Meaning, in_parts: bool) -> None:
        self._keys = keys
        self._index = index
        self._places = places
        self._meaning = meaning
        self._in_parts = in_parts  # a Cluster

    def write_names(self, plan: Plan) -> None:
        """Partitions that this frame is the first to know. In the loop's thread."""
        for pid in self._places.take_new():
            base = self._places.base(pid)
            plan.log.command("HSET", self._keys.partitions, pid, self._places.name_of(pid))
            if self._in_parts:  # a frame that a crash cut off may have left keys of this name
                plan.body(base).command("UNLINK", base)
                plan.body(base).command("UNLINK", again(base))

    def write_frame(
        self, plan: Plan, parts: Parts, address: int, size: int, first: bool, gone: list[int]
    ) -> Plan:
        """`first` of its segment; `gone` are partitions whose end it brings."""
        self._write_log(plan, parts.log, address, size, first)
        self._write_bodies(plan, parts.pieces, address)
        for pid in gone:
            plan.log.command("HDEL", self._keys.partitions, pid)
            self._places.forget(pid)
        self._index.forget(set(gone))
        return plan

    def _write_log(self, plan: Plan, log: bytes, address: int, size: int, first: bool) -> None:
        """The entry of the log comes first: Redis refuses it without memory, before anything is changed."""
        keys = self._keys
        segment = address >> 32
        steps = Steps()
        facts: list[Word] = ["at", address & 0xFFFF_FFFF, "size", size, "log", log]
        steps.command("XADD", keys.segment(segment), f"{plan.number}-1", *facts)
        if first:
            steps.command("ZADD", keys.segments, segment, segment)
            steps.command("HSET", keys.log, "segment", segment)
        plan.log.words = steps.words + plan.log.words
        plan.log.keys.update(steps.keys)

    def _write_bodies(self, plan: Plan, pieces: list[Piece], address: int) -> None:
        """The messages of a partition are one step, but for dead letters, which have fields of their own."""
        rows: dict[int, list[Word]] = {}  # ids and records, in turn
        for piece in pieces:
            pid = piece.pid
            self._index.add(address + piece.offset, pid, piece.seq)
            row = rows.get(pid)
            if row is None:
                row = rows[pid] = []
            if piece.has_headers and self._meaning.is_queue(pid):
                fields = fields_of(piece.record)
                if fields:
                    self._add(plan, pid, row)
                    self._add_letter(plan, pid, piece, fields)
                    row.clear()
                    continue
            row += (entry_id(piece.seq), piece.record)
        for pid, row in rows.items():
            self._add(plan, pid, row)

    def _add(self, plan: Plan, pid: int, row: list[Word]) -> None:
        if row:
            base = self._places.base(pid)
            steps = self._bodies(plan, base)
            steps.words += ["A", base, again(base), len(row) // 2, *row]

    def _add_letter(self, plan: Plan, pid: int, piece: Piece, fields: list[tuple[str, str]]) -> None:
        base = self._places.base(pid)
        words = self._bodies(plan, base).words
        words += ["D", base, again(base), entry_id(piece.seq), 1 + 2 * len(fields), piece.record]
        for name, value in fields:
            words += [name, value]

    def _bodies(self, plan: Plan, base: str) -> Steps:
        steps = plan.body(base)
        steps.keys[base] = None
        steps.keys[again(base)] = None
        return steps

    def write_snapshot(self, state: list[bytes], free: list[int], covered: int, segment: int) -> Plan:
        """The snapshot, and then what it makes superfluous."""
        keys = self._keys
        plan = Plan()
        plan.log.command("HSET", keys.snapshot, "covered", covered, "state", b"".join(state))
        plan.log.command("HSET", keys.log, "segment", segment)
        for number in free:
            plan.log.command("ZREM", keys.segments, number)
            plan.log.command("UNLINK", keys.segment(number))
            for pid, seqs in self._index.free(number).items():
                base = self._places.base(pid)
                view = plan.view(base)
                view.many("XDEL", base, [], [entry_id(seq) for seq in seqs])
                view.many("HDEL", again(base), [], list(seqs))
        return plan
