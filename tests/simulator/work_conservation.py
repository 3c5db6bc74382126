"""Work conservation: no consumer with capacity waits while a message could go to it.

The check reads the state of the engine at a moment when nothing more happens by itself, and
computes for each message whether it could be delivered. It uses neither the heaps nor the lists by
which the engine finds work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sluice.queues.engine import Engine
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import READY
from sluice.queues.model.group import Consumer, Group
from sluice.queues.model.queue_rules import ANY_ORDER, STRICT
from tests.simulator.oracle import Number, Violation


def eligible_members(group: Group) -> list[Consumer]:
    """Return the members that may get messages now."""
    prefetching = [one for one in group.consumers if one.prefetch > 0]
    reachable = [one for one in prefetching if not one.is_paused] or prefetching
    exclusive = [one for one in reachable if one.is_exclusive]
    if exclusive:
        return exclusive[:1]
    return [one for one in reachable if not one.is_stalled] or reachable


def deliverable(engine: Engine, cursor: Cursor) -> Iterator[tuple[int, int]]:
    """Yield (sequence, key) of deliverable messages; the key is 0 if any member may take it."""
    partition, group = cursor.partition, cursor.group
    rules = group.queue.rules
    active: dict[int, int] = {}
    for lease in cursor.leases.values():
        if lease.state != READY and lease.key_hash:
            active[int(lease.key_hash)] = active.get(int(lease.key_hash), 0) + 1
    waiting: list[tuple[int, int]] = []
    seq = int(partition.first_live(cursor.low_watermark))
    while seq < partition.committed_end:
        lease_or_none = cursor.leases.get(seq)
        if (
            not cursor.is_settled(seq)
            and partition.is_for_group(seq, group.gid)
            and seq not in partition.delayed_seqs
            and (lease_or_none is None or lease_or_none.state == READY)
        ):
            waiting.append((9 - int(partition.priority(seq)), seq))
        seq = int(partition.first_live(seq + 1))
    for _, seq in sorted(waiting):
        block = partition.find_block(seq)
        assert block is not None
        key = int(block.key_hash[block.index_of(seq)]) & 0xFFFF_FFFF
        if rules.ordering == ANY_ORDER:
            key = 0
        elif rules.ordering == STRICT:
            key = 1
        if not key:
            yield seq, 0
        elif key in group.held_keys:
            if group.is_repaired(partition, seq, key):
                yield seq, key
        elif group.queue.partition_gates and group.is_behind_gate(partition, seq, key):
            continue
        elif active.get(key, 0) < rules.batch_size:
            active[key] = active.get(key, 0) + 1
            yield seq, key


class Conservation:
    """Remembers since when a message waits although a member has capacity."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int, int], tuple[float, object]] = {}

    def check(
        self,
        engine: Engine,
        now: float,
        is_closed: Callable[[Group], bool],
        is_key_closed: Callable[[Group, Number], bool],
    ) -> int:
        """Raise a Violation if work is not conserved; return how many messages were checked.

        `is_closed` tells whether a policy forbids a delivery to a group, and `is_key_closed`
        whether a limit of its key forbids the delivery of one message.
        """
        seen: dict[tuple[int, int, int], tuple[float, object]] = {}
        checked = 0
        for gid, group in engine.groups.items():
            members = eligible_members(group)
            idle = [one for one in members if one.has_capacity()]
            if is_closed(group):
                continue
            if not idle or any(
                cursor.is_waiting_for_body or cursor.is_prefetching for cursor in group.cursors
            ):
                continue  # a body that is being read has capacity reserved for it
            for cursor in group.cursors:
                for seq, key in deliverable(engine, cursor):
                    number = (gid, int(cursor.partition.pid), seq)
                    if is_key_closed(group, number):
                        continue
                    checked += 1
                    owner = cursor.consumer
                    name = (
                        f"message {seq} of partition {cursor.partition.number}, group {group.name}"
                    )
                    if key == 0 or owner in idle or owner is None:
                        raise Violation(f"{idle} have capacity, and {name} waits (key {key})")
                    if max(one.priority for one in idle) < owner.priority:
                        continue
                    state = (owner, *((one, one.prefetch, one.is_stalled) for one in members))
                    since, before = self._since.get(number, (now, state))
                    if before != state:
                        since = now
                    seen[number] = (since, state)
                    if now - since > group.queue.rules.rebalance_after:
                        raise Violation(
                            f"{idle} have capacity, and {name} waits for {owner} "
                            f"since {now - since} s"
                        )
        self._since = seen
        return checked
