"""The simulated world: random client actions by one seed, and a store that crashes in between.

Each step does one action of a client or an operator, runs some of its consequences, and then runs
the checks. The engine, the commit loop and the memory store are the real ones.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sluice.errors import QueueFull, StaleDelivery, UnknownDelivery
from sluice.message import Message, decode_headers
from sluice.queues.commit_loop import read_messages
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.model.group import Group
from sluice.queues.model.queue import Queue
from sluice.queues.model.queue_rules import ANY_ORDER, DROP_OLDEST, PER_KEY, STRICT
from sluice.queues.names import format_message_id
from tests.queues.kit import rules_of
from tests.simulator.checker import Checker
from tests.simulator.environment import serial_of
from tests.simulator.oracle import ACKED, PURGED, UNSETTLED, Number, Sent, Violation
from tests.simulator.participants import HeldDelivery, SimulatedConsumer
from tests.simulator.schedule import check_expiry
from tests.simulator.work_conservation import Conservation

KEYS: Final = (b"", b"a", b"b", b"c", b"d", b"e")
GROUPS: Final = ("red", "green", "blue")


class World(Checker):
    def __init__(self, seed: int, **fixed: Any) -> None:
        super().__init__(seed, **fixed)
        self.conservation = Conservation()
        # Ids of deleted queues, with the frame of the deletion: a crash may undo it.
        self.deleted_ids: list[tuple[int, dict[tuple[str, bytes], Sent]]] = []

    # ---- actions

    def publish(self) -> None:
        rng = self.rng
        name = rng.choice(("one", "one", "two"))
        if name not in self.engine.queues:
            self.engine.lifecycle.get_or_create_queue(name)
            self._log_step(f"queue {name} is created")
        self.serial += 1
        key = rng.choice(KEYS)
        own_id = b""
        if rng.random() < 0.3:
            own_id = b"id-%d" % rng.randrange(max(1, self.serial - 12), self.serial + 1)
        message = Message(
            b"%d:%s" % (self.serial, b"x" * rng.choice((0, 10, 300))), b"", key, own_id
        )
        if rng.random() < 0.15:
            message.priority = rng.randrange(10)
        if rng.random() < 0.1:
            message.deliver_at_ms = int((self.loop.now + rng.choice((0.5, 10.0, 100.0))) * 1000)
        if rng.random() < 0.1:
            message.expires = int(self.loop.now + rng.choice((2, 20, 200)))
        self.send(name, message)

    def send(self, name: str, message: Message) -> None:
        """Publish a message whose payload begins with the latest serial."""
        existing = self.engine.queues[name]
        key, own_id = message.key, message.id
        rules = existing.rules
        plain = not message.priority and message.deliver_at_ms <= int(self.loop.now * 1000)
        order_key = b"*" if rules.ordering == STRICT else key
        sent = Sent(self.serial, name, order_key, own_id, plain, self.loop.now)
        wanted = int(message.expires)
        if message.deliver_at_ms > int(self.loop.now * 1000):
            sent.due = message.deliver_at_ms / 1000
        before = [int(partition.next_seq) for partition in existing.partitions]
        duplicates = existing.duplicates
        was_full = existing.depth >= rules.max_depth
        known = self.ids.get((name, own_id)) if own_id else None
        tag = self.serial
        self.by_tag[tag] = sent
        sent.frame = self.oracle.frame
        try:
            self.engine.publishing.publish(existing, message, self.publisher, tag)
        except QueueFull:
            del self.by_tag[tag]
            if not was_full:
                raise Violation("refused as full, and is not") from None
            self._count("refused as full")
            return
        locations = [
            (int(partition.pid), seq)
            for partition, start in zip(existing.partitions, before)
            for seq in range(start, int(partition.next_seq))
        ]
        within = known is not None and self.loop.now - known.sent_at < rules.dedup_window
        if existing.duplicates > duplicates:
            if locations or known is None:
                raise Violation(f"{own_id!r} was taken for a duplicate")
            sent.frame = known.frame
            self._count("duplicates")
            self._log_step(f"publish {self.serial} {own_id!r} is a duplicate")
            return
        if within and known is not None and known.receipt and not known.is_id_lost:
            raise Violation(f"{own_id!r} was stored twice within its window")
        if own_id:
            self.ids[(name, own_id)] = sent
        if was_full and rules.overflow == DROP_OLDEST:
            self.purged_now.add(name)
        if not locations:
            if not was_full:
                raise Violation("a message was not stored")
            # Its id is remembered only until this process ends.
            sent.is_id_lost = True
            self._count("overflowed into the dead letters")
            return
        sent.expire_at(int(message.expires))
        check_expiry(sent.expires, wanted, sent.due or self.loop.now, rules.message_ttl)
        for group in existing.groups.values():
            self.oracle.add(int(group.gid), sent, locations[0])
        self.locations.setdefault(locations[0][0], {})[locations[0][1]] = sent
        self._count("published")
        self._log_step(
            f"publish {self.serial} key {key!r} id {own_id!r} to {name} at {locations[0]}"
        )

    def settle(self) -> None:
        consumers = [consumer for consumer in self.consumers if consumer.holds]
        if not consumers:
            return
        consumer = self.rng.choice(consumers)
        held = self.rng.choice(list(consumer.holds.values()))
        self._settle(held, consumer, late=False)

    def settle_late(self) -> None:
        """Settle an earlier delivery late."""
        if not self.old:
            return
        held = self.rng.choice(self.old)
        current = next((one for one in self.consumers if one.holds.get(held.number) is held), None)
        self._settle(held, current, late=current is None)

    def settle_earlier(self) -> None:
        """Settle a delivery of a previous run by message id, if no client holds it."""
        if not self.previous_run:
            return
        held, sent = self.previous_run.pop(self.rng.randrange(len(self.previous_run)))
        queue = self.engine.queues.get(held.queue_name)
        group = queue.groups.get(held.group_name) if queue is not None else None
        gid, pid, seq = number = held.number
        if (
            group is None
            or int(group.gid) != gid
            or self.locations.get(pid, {}).get(seq) is not sent
        ):
            return
        what = self.rng.choice(("ack", "nack", "reject", "extend", "release"))
        self._log_step(f"{held.client} {what} {number} of a previous run")
        name = format_message_id(pid, seq)
        if what == "ack":
            lease = None
            counted = self.engine.lease_lookup.ack_late(group, name, held.token, held.client)
        else:
            lease = self.engine.lease_lookup.reclaim_lease(group, name, held.token, held.client)
            counted = lease is not None
        if counted and number in self.oracle.in_flight:
            raise Violation(f"{number} has another holder, and an old token settles it")
        self._count(f"earlier {what}" if counted else f"earlier {what} refused")
        if lease is None:
            if counted:
                self.acked(number)
            return
        was_leased = lease.state == LEASED
        try:
            if what == "nack":
                delay = self.rng.choice((-1.0, 0.0, 3.0))
                self.engine.settlement.nack(lease, delay, "no luck")
                if was_leased:
                    self.failed(number, delay, int(lease.attempt), was_delivered=False)
            elif what == "reject":
                self.engine.settlement.dead_letter(lease, "rejected", "no good", True)
                self.schedule.rejected.add(number)
            elif what == "extend":
                self.engine.settlement.extend(lease)
                self.schedule.reclaim(self.oracle.pairs[number], self.oracle.frame)
                self.previous_run.append((held, sent))
            else:
                self.engine.settlement.release(lease)
        except StaleDelivery:
            if was_leased:
                raise

    def _settle(self, held: HeldDelivery, consumer: SimulatedConsumer | None, late: bool) -> None:
        queue = self.engine.queues.get(held.queue_name)
        group = queue.groups.get(held.group_name) if queue is not None else None
        if queue is None or group is None or int(group.gid) != held.number[0]:
            return
        what = self.rng.choice(("ack",) * 6 + ("nack", "nack", "reject", "extend", "release"))
        owner = self.oracle.in_flight.get(held.number)
        try:
            lease = self.engine.lease_lookup.find_lease(group, held.name, held.token, held.client)
        except (StaleDelivery, UnknownDelivery):
            if not late:
                raise Violation(f"{consumer} has {held.number} and may not settle it") from None
            self._count("refused as late")
            return
        if lease.token_counter != held.token.counter:
            raise Violation(f"an old token settles {held.number}")
        number = (int(lease.cursor.group.gid), int(lease.cursor.partition.pid), int(lease.seq))
        if number != held.number:
            raise Violation(f"the token of {held.number} settles {number}")
        if owner is not None and consumer is None:
            raise Violation(f"{owner} has {number}, and {held.client} may settle it")
        is_leased = lease.state == LEASED
        try:
            self._log_step(f"{held.client} {what} {number} late={late}")
            if what == "ack":
                self.engine.settlement.ack(lease)
                self.acked(number)
            elif what == "nack":
                delay = self.rng.choice((-1.0, -1.0, 0.0, 3.0))
                self.engine.settlement.nack(lease, delay, "no luck")
                self.failed(number, delay, int(lease.attempt))
            elif what == "reject":
                self.engine.settlement.dead_letter(
                    lease, self.rng.choice(("rejected", "unacceptable")), "no good", True
                )
                self.schedule.rejected.add(number)
            elif what == "extend":
                self.engine.settlement.extend(lease)
                self.schedule.extended(number)
            else:
                self.engine.settlement.release(lease)
        except StaleDelivery:
            if is_leased:
                raise
            self._count(f"late {what} refused")
            return
        self._count(what if not late else f"late {what}")
        if what != "extend":
            self.returned(number)
            if consumer is not None:
                consumer.holds.pop(number, None)

    def join(self) -> None:
        if len(self.consumers) > 8:
            return
        name = self.rng.choice(("one", "one", "two"))
        queue = self.engine.lifecycle.get_or_create_queue(name)
        group = self._group(queue, self.rng.choice(GROUPS[: 1 + self.seed % 3]))
        self.clients += 1
        priority = self.rng.choice((0, 0, 0, 0, 1))
        self.add_consumer(queue, group, self.rng.choice((1, 3, 20)), priority)

    def add_consumer(
        self, queue: Queue, group: Group, prefetch: int, priority: int = 0
    ) -> SimulatedConsumer:
        consumer = SimulatedConsumer(self, f"c{self.clients}", prefetch, priority)
        self.consumers.append(consumer)
        self.engine.dispatch.join(group, consumer)
        self._log_step(f"{consumer} joins {group.name} of {queue.name}")
        return consumer

    def _group(self, queue: Queue, name: str) -> Group:
        known = queue.groups.get(name)
        if known is not None:
            return known
        kind = self.rng.choice(("earliest", "earliest", "latest", "middle"))
        start_sequences: list[int] | None = None
        if kind == "latest":
            start_sequences = [int(partition.next_seq) for partition in queue.partitions]
        elif kind == "middle":
            start_sequences = [
                self.rng.randrange(int(partition.next_seq) + 3) for partition in queue.partitions
            ]
        return self.make_group(queue, name, start_sequences)

    def make_group(self, queue: Queue, name: str, start_sequences: list[int] | None) -> Group:
        waiting = self._waiting_for_anyone(queue)
        group = self.engine.lifecycle.get_or_create_group(queue, name, start_sequences)
        self.group_frames[int(group.gid)] = (self.oracle.frame, "created")
        self.gids_of.setdefault((queue.name, name), set()).add(int(group.gid))
        for partition, cursor in zip(queue.partitions, group.cursors):
            for seq, sent in sorted(waiting.get(int(partition.pid), {}).items()):
                if seq >= cursor.low_watermark and partition.holds(seq):
                    if int(seq) not in partition.target_groups:
                        self.oracle.add(int(group.gid), sent, (int(partition.pid), seq))
        self._log_step(f"group {name} of {queue.name} is created at {start_sequences}")
        self._count("groups created")
        return group

    def _waiting_for_anyone(self, queue: Queue) -> dict[int, dict[int, Sent]]:
        """Return the messages by location, for groups that are created later."""
        return {
            int(partition.pid): self.locations.get(int(partition.pid), {})
            for partition in queue.partitions
        }

    def leave(self) -> None:
        if self.consumers:
            self._leave(self.rng.choice(self.consumers))

    def pause(self) -> None:
        if self.consumers:
            consumer = self.rng.choice(self.consumers)
            consumer.is_connected = not consumer.is_connected
            if consumer.is_connected:
                self.engine.dispatch.set_paused(consumer, False)
            else:
                self.engine.dispatch.set_paused(consumer, True)
            self._log_step(f"{consumer} is connected: {consumer.is_connected}")

    def change_prefetch(self) -> None:
        if self.consumers:
            consumer = self.rng.choice(self.consumers)
            self.engine.dispatch.set_prefetch(consumer, self.rng.choice((0, 1, 5, 50)))

    def reconfigure(self) -> None:
        if not self.engine.queues:
            return
        name = self.rng.choice(("one", "two"))
        queue = self.engine.queues.get(name)
        if queue is None:
            return
        config = json.loads(queue.config_json)
        what = self.rng.choice(
            (
                "partitions",
                "partitions",
                "delivery_timeout",
                "max_depth",
                "retention",
                "max_retries",
                "message_ttl",
            )
        )
        if what == "partitions":
            if config["ordering"] == STRICT or len(queue.partitions) >= 9:
                return
            config[what] = len(queue.partitions) + self.rng.randrange(1, 3)
        elif what == "retention":
            config[what] = self.rng.choice((0.0, 40.0))
        elif what == "delivery_timeout":
            config[what] = self.rng.choice((2.0, 5.0, 30.0))
        elif what == "max_depth":
            config[what] = self.rng.choice((20, 60, 100_000))
        elif what == "max_retries":
            config[what] = self.rng.choice((0, 3, 10))
        else:
            config[what] = self.rng.choice((0.0, 60.0))
        self.engine.lifecycle.reconfigure_queue(queue, rules_of(name, config), json.dumps(config))
        self.retention.rules_changed(name)
        self._log_step(f"{name}: {what} is {config[what]}")
        self._count("reconfigured")

    def change_order(self) -> None:
        """Change the ordering; active messages stay active."""
        queue = self.engine.queues.get("one")
        if queue is None or not self.changes_order:
            return
        config = json.loads(queue.config_json)
        config["ordering"] = self.rng.choice((ANY_ORDER, PER_KEY))
        config["batch_size"] = self.rng.choice((2, 4))
        if config["ordering"] != queue.rules.ordering:
            self.key_holds.forget([int(group.gid) for group in queue.groups.values()])
        self.engine.lifecycle.reconfigure_queue(queue, rules_of("one", config), json.dumps(config))
        self._count("orders changed")

    def seek(self) -> None:
        queue = self.engine.queues.get(self.rng.choice(("one", "two")))
        if queue is None or not queue.groups:
            return
        group = self.rng.choice(list(queue.groups.values()))
        start_sequences = [
            self.rng.randrange(int(partition.next_seq) + 2) for partition in queue.partitions
        ]
        self._log_step(f"{group.name} of {queue.name} seeks {start_sequences}")
        self.is_ending_groups = True
        self.engine.lifecycle.seek_group(group, start_sequences)
        self.is_ending_groups = False
        self._count("seeks")
        gid = int(group.gid)
        self.key_holds.forget([gid])
        self.policies.breakers.forget_attempts(gid)
        for number, pair in self.oracle.pairs.items():
            if number[0] == gid:
                pair.attempts.reset(self.oracle.frame)
        for partition, start_sequence in zip(queue.partitions, start_sequences):
            pid = int(partition.pid)
            for number, pair in list(self.oracle.pairs.items()):
                if number[0] == gid and number[1] == pid and number[2] < start_sequence:
                    self.oracle.settle(pair, PURGED)
            for seq, sent in sorted(self.locations.get(pid, {}).items()):
                number = (gid, pid, seq)
                if (
                    seq >= start_sequence
                    and partition.holds(seq)
                    and number not in self.oracle.pairs
                ):
                    if partition.is_for_group(seq, gid):
                        self._revive(number, sent)

    def _revive(self, number: tuple[int, int, int], sent: Sent) -> None:
        pair = self.oracle.past.get(number)
        if pair is None:
            self.oracle.add(number[0], sent, (number[1], number[2]))
            pair = self.oracle.pairs[number]
            pair.states = [(0, ACKED), (self.oracle.frame, UNSETTLED)]
        else:
            pair.become(UNSETTLED, self.oracle.frame)
            self.oracle.revive(pair)
        pair.attempts.reset(self.oracle.frame)
        pair.targeted = True  # its order among those of its key is lost

    def drop_group(self) -> None:
        queue = self.engine.queues.get(self.rng.choice(("one", "two")))
        if queue is None or not queue.groups:
            return
        group = self.rng.choice(list(queue.groups.values()))
        gid = int(group.gid)
        self._log_step(f"group {group.name} of {queue.name} ({gid}) is deleted")
        self.is_ending_groups = True
        self.engine.lifecycle.delete_group(group)
        self.is_ending_groups = False
        self._count("groups dropped")
        self._forget_group(gid)
        self.group_frames[gid] = (self.oracle.frame, "dropped")
        self.purged_now.add(queue.name)

    def _forget_group(self, gid: int) -> None:
        self.key_holds.forget([gid])
        self.consumers = [one for one in self.consumers if one.group is not None]
        for number in [number for number in self.oracle.pairs if number[0] == gid]:
            self.oracle.settle(self.oracle.pairs[number], PURGED)
        for number in [number for number in self.oracle.in_flight if number[0] == gid]:
            raise Violation(f"{number} was not revoked with its group")

    def delete_queue(self) -> None:
        queue = self.engine.queues.get(self.rng.choice(("one", "two")))
        if queue is None:
            return
        gids = [int(group.gid) for group in queue.groups.values()]
        self._log_step(f"queue {queue.name} is deleted")
        self.is_ending_groups = True
        self.engine.lifecycle.delete_queue(queue)
        self.is_ending_groups = False
        self._count("queues deleted")
        for gid in gids:
            self._forget_group(gid)
            self.group_frames[gid] = (self.oracle.frame, "dropped")
        deleted = {at: sent for at, sent in self.ids.items() if at[0] == queue.name}
        self.deleted_ids.append((self.oracle.frame, deleted))
        self.ids = {at: sent for at, sent in self.ids.items() if at[0] != queue.name}

    def purge(self) -> None:
        queue = self.engine.queues.get(self.rng.choice(("one", "two", "dlq/one", "dlq/two")))
        if queue is None:
            return
        self._log_step(f"{queue.name} is purged")
        self.has_touched_dead_letters = self.has_touched_dead_letters or queue.name.startswith(
            "dlq/"
        )
        self.engine.removal.purge_queue(queue)
        self.purged_now.add(queue.name)
        self._count("purges")

    def redrive(self) -> None:
        dlq = self.engine.queues.get(self.rng.choice(("dlq/one", "dlq/two")))
        if dlq is None:
            return
        locations = [
            (partition, seq)
            for partition in dlq.partitions
            for seq in range(int(partition.first_live(0)), int(partition.committed_end))
            if partition.holds(seq)
        ]
        if not locations:
            return
        partition, seq = self.rng.choice(locations)
        found: list[Message | None] = []
        read_messages(self.commit_loop, [(partition, seq)], found.extend)
        self._run_all()
        if not found or found[0] is None or not partition.holds(seq):
            return
        headers = dict(decode_headers(found[0].headers))
        original_queue = self.engine.queues.get(headers["original-queue"])
        before = (
            {int(one.pid): int(one.next_seq) for one in original_queue.partitions}
            if original_queue is not None
            else {}
        )
        to_all = self.rng.random() < 0.3
        if not self.engine.redrive.redrive(partition, seq, found[0], to_all):
            if original_queue is not None:
                raise Violation("a dead letter could not be redriven")
            return
        assert original_queue is not None
        self._count("redriven")
        self.has_touched_dead_letters = True
        key = b"*" if original_queue.rules.ordering == STRICT else found[0].key
        serial = serial_of(found[0].payload)
        sent = Sent(
            serial,
            original_queue.name,
            key,
            headers.get("original-message-id", "").encode(),
            False,
            self.loop.now,
        )
        for one in original_queue.partitions:
            for new in range(before[int(one.pid)], int(one.next_seq)):
                target = one.target_groups.get(new, 0)
                sent.expire_at(int(one.expires(new)))
                sent.frame = self.oracle.frame
                self.locations.setdefault(int(one.pid), {})[new] = sent
                for group in original_queue.groups.values():
                    if target in (0, group.gid):
                        self.oracle.add(int(group.gid), sent, (int(one.pid), new), True)
                        self.key_holds.put_back(
                            (int(partition.pid), seq),
                            int(original_queue.key_hash(found[0].key)),
                            (int(group.gid), int(one.pid), new),
                        )
                self._log_step(
                    f"dead letter {serial} returns to {original_queue.name} "
                    f"at {(one.pid, new)} for {target}"
                )

    def cancel(self) -> None:
        if self.oracle.pairs:
            pair = self.rng.choice(list(self.oracle.pairs.values()))
            what = self.commands.cancel(pair.location, pair.sent.own_id)
            self._count(what)
            self._log_step(f"{pair.location} {what}")

    def reschedule(self) -> None:
        if self.oracle.pairs:
            pair = self.rng.choice(list(self.oracle.pairs.values()))
            seconds = self.rng.choice((0.0, 0.0, 1.0, 20.0, 200.0))
            what = self.commands.reschedule(pair.location, pair.sent.own_id, seconds)
            self._count(what)
            self._log_step(f"{pair.location} {what} by {seconds}")

    # ---- time and restarts

    def pass_time(self) -> None:
        self.advance(self.rng.choice((0.01, 0.1, 1.0, 1.0, 5.0, 30.0, 400.0)))

    def advance(self, seconds: float) -> None:
        until = self.loop.now + seconds
        self.schedule.exact_from = self.loop.now if self.is_armed else 0.0
        while True:
            due = self.loop.next_timer()
            if due == 0.0 or due > until:
                break
            self.loop.now = max(self.loop.now, due)
            self.loop.fire_timers()
            if self.rng.random() < 0.5:
                self._run_some()
        self.loop.now = until
        self.schedule.exact_from = 0.0
        if self.is_armed:
            self.check_times()
        else:
            self.retention.missed()

    def hold(self) -> None:
        self.store.hold()

    def release(self) -> None:
        self.store.release(self.rng.choice((1, 2, -1)))

    def crash(self) -> None:
        """Cut the power at any moment."""
        keep = self.rng.randrange(self.store.count_unsynced() + 1)
        self._log_step(
            f"CRASH, keeps {keep} of {self.store.count_unsynced()}; durable {self.oracle.durable}"
        )
        self._count("crashes")
        self.store = self.store.crash(keep)
        self._reopen()

    def restart(self) -> None:
        """Shut down cleanly: everything is committed."""
        self._log_step("restart")
        self._count("restarts")
        self.commit_loop.close()
        self.oracle.durable = self.oracle.frames
        self._reopen()

    def _reopen(self) -> None:
        self.loop.clear()
        self.previous_run += [
            (held, self.locations[held.number[1]][held.number[2]])
            for held in self.old
            if held.number[2] in self.locations.get(held.number[1], {})
        ]
        del self.previous_run[:-100]
        self.consumers = []
        self.old = []
        for frame, deleted in self.deleted_ids:
            if not self.oracle.is_durable(frame):
                self.ids.update(deleted)
        self.deleted_ids = []
        self.by_tag = {}
        self.oracle.in_flight = {}
        self.schedule.restarted()
        self.commands.restarted()
        self.key_holds.restarted()
        self.dead_lettered_now = set()
        self.uncommitted_now = set()
        self._open()
        self._scan_queues()
        self.policies.restarted(self.engine)

    def _stop_all(self) -> None:
        """Run until idle; then no consumer with capacity may lack work."""
        self.commit_loop.end_turn()
        self._run_all()
        while 0.0 < self.loop.next_timer() <= self.loop.now:
            self.loop.fire_timers()
            self._run_all()
        self.commit_loop.end_turn()
        self._run_all()
        self.counts["conserved"] = self.counts.get("conserved", 0) + self.conservation.check(
            self.engine, self.loop.now, self._is_closed, self._is_key_closed
        )

    def _is_closed(self, group: Group) -> bool:
        return self.policies.closes(group, self._busy())

    def _is_key_closed(self, group: Group, number: Number) -> bool:
        return self.policies.closes_key(group, number, self._busy())

    def _busy(self) -> set[Number]:
        return {*self.schedule.running, *self.schedule.reclaimed}

    def check_turn(self) -> None:
        """Check all events since the last check."""
        effects = self.engine.state.effects
        self._report(effects.alerts, effects.warnings)
        effects.alerts = []
        effects.warnings = []
        self.check()

    def step(self) -> None:
        self.steps += 1
        self.engine.now = self.loop.now
        self.unauthorized.try_one(self.engine, self.old)
        if changed := self.policies.act(self.engine):
            self._log_step(changed)
        what = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        self.doing = what
        getattr(self, what)()
        self.is_armed = self.is_armed and what == "pass_time"
        self.engine.now = self.loop.now
        if self.rng.random() < 0.8:
            self.commit_loop.end_turn()
            self.is_armed = True
            self._run_some()
        self.check_turn()
        if self.rng.random() < 0.3:
            self._stop_all()
            self.check_turn()
        if self.steps % 50 == 0:
            self.oracle.forget_durable_past()
        if self.steps % 2500 == 0:
            self.drain()


ACTIONS: Final = {
    "publish": 40,
    "settle": 40,
    "settle_late": 6,
    "settle_earlier": 3,
    "join": 6,
    "leave": 2,
    "pause": 2,
    "change_prefetch": 2,
    "pass_time": 14,
    "hold": 3,
    "release": 6,
    "reconfigure": 1,
    "change_order": 0.5,
    "seek": 0.6,
    "drop_group": 0.3,
    "delete_queue": 0.1,
    "purge": 0.3,
    "redrive": 2,
    "cancel": 2,
    "reschedule": 3,
    "crash": 1.5,
    "restart": 0.3,
}


def run(seed: int, steps: int, **fixed: Any) -> World:
    """Run one world; a violation is raised with the seed and the last log lines."""
    world = World(seed, **fixed)
    try:
        for _ in range(steps):
            world.step()
        world.drain()
    except Exception as error:
        tail = "\n".join(world.log[-60:])
        raise Violation(
            f"seed {seed}, step {world.steps}, {world.doing}: {error}\n{tail}"
        ) from error
    return world
