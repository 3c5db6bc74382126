"""What people do with queues, one thing at a time, by one seed; and a store that dies in the midst of it.

Each step does one thing that somebody might do, lets some of what follows happen and some not, and then asks the judge.
The engine, the runner and the memory store are the real ones.
"""

from __future__ import annotations

import json
from typing import Any, Final

from sluice.errors import QueueFull, StaleDelivery, UnknownDelivery
from sluice.message import Message, decode_headers
from sluice.queues.flow import dead_letters
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.model.group import Group
from sluice.queues.model.queue import Queue
from sluice.queues.model.queue_rules import ANY_ORDER, DROP_OLDEST, PER_KEY, STRICT
from sluice.queues.names import format_message_id
from tests.queues.kit import rules_of
from tests.simulator.checker import Checker
from tests.simulator.environment import serial_of
from tests.simulator.oracle import ACKED, PURGED, WAITS, Sent, Violation
from tests.simulator.participants import HeldDelivery, SimulatedConsumer
from tests.simulator.schedule import check_expiry
from tests.simulator.work_conservation import Conservation

KEYS: Final = (b"", b"a", b"b", b"c", b"d", b"e")
GROUPS: Final = ("red", "green", "blue")


class World(Checker):
    def __init__(self, seed: int, **fixed: Any) -> None:
        super().__init__(seed, **fixed)
        self.conservation = Conservation()

    # ---- what people do

    def publish(self) -> None:
        chance = self.chance
        name = chance.choice(("one", "one", "two"))
        if name not in self.engine.queues:
            self.engine.get_or_create_queue(name)
            self._log_step(f"queue {name} comes into being")
        self.serial += 1
        key = chance.choice(KEYS)
        own_id = b""
        if chance.random() < 0.3:
            own_id = b"id-%d" % chance.randrange(max(1, self.serial - 12), self.serial + 1)
        message = Message(
            b"%d:%s" % (self.serial, b"x" * chance.choice((0, 10, 300))), b"", key, own_id
        )
        if chance.random() < 0.15:
            message.priority = chance.randrange(10)
        if chance.random() < 0.1:
            message.deliver_at = int((self.loop.now + chance.choice((0.5, 10.0, 100.0))) * 1000)
        if chance.random() < 0.1:
            message.expires = int(self.loop.now + chance.choice((2, 20, 200)))
        self.send(name, message)

    def send(self, name: str, message: Message) -> None:
        """Publish a message, whose payload begins with the latest serial."""
        existing = self.engine.queues[name]
        key, own_id = message.key, message.id
        rules = existing.rules
        plain = not message.priority and message.deliver_at <= int(self.loop.now * 1000)
        lane = b"*" if rules.ordering == STRICT else key
        sent = Sent(self.serial, name, lane, own_id, plain, self.loop.now)
        wanted = int(message.expires)
        if message.deliver_at > int(self.loop.now * 1000):
            sent.due = message.deliver_at / 1000
        before = [int(partition.next_seq) for partition in existing.partitions]
        duplicates = existing.duplicates
        was_full = existing.depth >= rules.max_depth
        known = self.ids.get((name, own_id)) if own_id else None
        tag = self.serial
        self.by_tag[tag] = sent
        sent.frame = self.oracle.frame
        try:
            self.engine.publish(existing, message, self.author, tag)
        except QueueFull:
            del self.by_tag[tag]
            if not was_full:
                raise Violation("refused as full, and is not") from None
            self._count("refused as full")
            return
        places = [
            (int(partition.pid), seq)
            for partition, start in zip(existing.partitions, before)
            for seq in range(start, int(partition.next_seq))
        ]
        within = known is not None and self.loop.now - known.sent_at < rules.dedup_window
        if existing.duplicates > duplicates:
            if places or known is None:
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
        if not places:
            if not was_full:
                raise Violation("a message was not stored")
            sent.is_id_lost = (
                True  # its id is remembered for as long as this process lives, no longer
            )
            self._count("overflowed into the dead letters")
            return
        sent.expires = int(message.expires)
        check_expiry(sent.expires, wanted, sent.due or self.loop.now, rules.message_ttl)
        for group in existing.groups.values():
            self.oracle.add(int(group.gid), sent, places[0])
        self.places.setdefault(places[0][0], {})[places[0][1]] = sent
        self._count("published")
        self._log_step(f"publish {self.serial} key {key!r} id {own_id!r} to {name} at {places[0]}")

    def settle(self) -> None:
        consumers = [consumer for consumer in self.consumers if consumer.holds]
        if not consumers:
            return
        consumer = self.chance.choice(consumers)
        held = self.chance.choice(list(consumer.holds.values()))
        self._settle(held, consumer, late=False)

    def settle_late(self) -> None:
        """Somebody comes back with something it once had."""
        if not self.old:
            return
        held = self.chance.choice(self.old)
        current = next(
            (hand for hand in self.consumers if hand.holds.get(held.number) is held), None
        )
        self._settle(held, current, late=current is None)

    def settle_earlier(self) -> None:
        """The same, and the server has died since: it finds the message by its place, if nobody has it."""
        if not self.previous_run:
            return
        held, sent = self.previous_run.pop(self.chance.randrange(len(self.previous_run)))
        queue = self.engine.queues.get(held.queue_name)
        group = queue.groups.get(held.group_name) if queue is not None else None
        gid, pid, seq = number = held.number
        if group is None or int(group.gid) != gid or self.places.get(pid, {}).get(seq) is not sent:
            return
        what = self.chance.choice(("ack", "nack", "reject", "extend", "release"))
        self._log_step(f"{held.client} {what} {number} of an earlier life")
        name = format_message_id(pid, seq)
        if what == "ack":
            lease = None
            counted = self.engine.ack_late(group, name, held.token, held.client)
        else:
            lease = self.engine.reclaim_lease(group, name, held.token, held.client)
            counted = lease is not None
        if counted and number in self.oracle.in_flight:
            raise Violation(f"{number} is in other hands, and an old token settles it")
        self._count(f"earlier {what}" if counted else f"earlier {what} refused")
        if lease is None:
            if counted:
                self.acked_now.add(number)
            return
        was_leased = lease.state == LEASED
        try:
            if what == "nack":
                delay = self.chance.choice((-1.0, 0.0, 3.0))
                self.engine.nack(lease, delay, "no luck")
                if was_leased:
                    self.failed(number, delay, was_delivered=False)
            elif what == "reject":
                self.engine.dead_letter(lease, "rejected", "no good")
                self.schedule.rejected.add(number)
            elif what == "extend":
                self.engine.extend(lease)
                self.schedule.retake(self.oracle.pairs[number], self.oracle.frame)
                self.previous_run.append((held, sent))
            else:
                self.engine.release(lease)
        except StaleDelivery:
            if was_leased:
                raise

    def _settle(self, held: HeldDelivery, consumer: SimulatedConsumer | None, late: bool) -> None:
        queue = self.engine.queues.get(held.queue_name)
        group = queue.groups.get(held.group_name) if queue is not None else None
        if queue is None or group is None or int(group.gid) != held.number[0]:
            return
        what = self.chance.choice(("ack",) * 6 + ("nack", "nack", "reject", "extend", "release"))
        owner = self.oracle.in_flight.get(held.number)
        try:
            lease = self.engine.find_lease(group, held.name, held.token, held.client)
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
                self.engine.ack(lease)
                self.acked_now.add(number)
            elif what == "nack":
                delay = self.chance.choice((-1.0, -1.0, 0.0, 3.0))
                self.engine.nack(lease, delay, "no luck")
                self.failed(number, delay)
            elif what == "reject":
                self.engine.dead_letter(
                    lease, self.chance.choice(("rejected", "unacceptable")), "no good"
                )
                self.schedule.rejected.add(number)
            elif what == "extend":
                self.engine.extend(lease)
                self.schedule.extended(number)
            else:
                self.engine.release(lease)
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
        name = self.chance.choice(("one", "one", "two"))
        queue = self.engine.get_or_create_queue(name)
        group = self._group(queue, self.chance.choice(GROUPS[: 1 + self.seed % 3]))
        self.clients += 1
        priority = self.chance.choice((0, 0, 0, 0, 1))
        self.add_consumer(queue, group, self.chance.choice((1, 3, 20)), priority)

    def add_consumer(
        self, queue: Queue, group: Group, prefetch: int, priority: int = 0
    ) -> SimulatedConsumer:
        consumer = SimulatedConsumer(self, f"c{self.clients}", prefetch, priority)
        self.consumers.append(consumer)
        self.engine.join(queue, group, consumer)
        self._log_step(f"{consumer} joins {group.name} of {queue.name}")
        return consumer

    def _group(self, queue: Queue, name: str) -> Group:
        known = queue.groups.get(name)
        if known is not None:
            return known
        kind = self.chance.choice(("earliest", "earliest", "latest", "middle"))
        floors: list[int] | None = None
        if kind == "latest":
            floors = [int(partition.next_seq) for partition in queue.partitions]
        elif kind == "middle":
            floors = [
                self.chance.randrange(int(partition.next_seq) + 3) for partition in queue.partitions
            ]
        return self.make_group(queue, name, floors)

    def make_group(self, queue: Queue, name: str, floors: list[int] | None) -> Group:
        waiting = self._waiting_for_anyone(queue)
        group = self.engine.get_or_create_group(queue, name, floors)
        self.group_frames[int(group.gid)] = (self.oracle.frame, "made")
        self.gids_of.setdefault((queue.name, name), set()).add(int(group.gid))
        for partition, cursor in zip(queue.partitions, group.cursors):
            for seq, sent in sorted(waiting.get(int(partition.pid), {}).items()):
                if seq >= cursor.low_watermark and partition.holds(seq):
                    if int(seq) not in partition.target_groups:
                        self.oracle.add(int(group.gid), sent, (int(partition.pid), seq))
        self._log_step(f"group {name} of {queue.name} is made at {floors}")
        self._count("groups made")
        return group

    def _waiting_for_anyone(self, queue: Queue) -> dict[int, dict[int, Sent]]:
        """Messages by place, for groups that come later."""
        return {
            int(partition.pid): self.places.get(int(partition.pid), {})
            for partition in queue.partitions
        }

    def leave(self) -> None:
        if self.consumers:
            self._leave(self.chance.choice(self.consumers))

    def pause(self) -> None:
        if self.consumers:
            consumer = self.chance.choice(self.consumers)
            consumer.is_connected = not consumer.is_connected
            if consumer.is_connected:
                self.engine.resume(consumer)
            else:
                self.engine.pause(consumer)
            self._log_step(f"{consumer} has a line: {consumer.is_connected}")

    def change_prefetch(self) -> None:
        if self.consumers:
            consumer = self.chance.choice(self.consumers)
            self.engine.set_prefetch(consumer, self.chance.choice((0, 1, 5, 50)))

    def reconfigure(self) -> None:
        if not self.engine.queues:
            return
        name = self.chance.choice(("one", "two"))
        queue = self.engine.queues.get(name)
        if queue is None:
            return
        reported = json.loads(queue.config_json)
        what = self.chance.choice(
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
            if reported["ordering"] == STRICT or len(queue.partitions) >= 9:
                return
            reported[what] = len(queue.partitions) + self.chance.randrange(1, 3)
        elif what == "retention":
            reported[what] = self.chance.choice((0.0, 40.0))
        elif what == "delivery_timeout":
            reported[what] = self.chance.choice((2.0, 5.0, 30.0))
        elif what == "max_depth":
            reported[what] = self.chance.choice((20, 60, 100_000))
        elif what == "max_retries":
            reported[what] = self.chance.choice((0, 3, 10))
        else:
            reported[what] = self.chance.choice((0.0, 60.0))
        self.engine.reconfigure_queue(queue, rules_of(name, reported), json.dumps(reported))
        self.retention.rules_changed(name)
        self._log_step(f"{name}: {what} is {reported[what]}")
        self._count("reconfigured")

    def change_order(self) -> None:
        """What was out under the old order stays out."""
        queue = self.engine.queues.get("one")
        if queue is None or not self.changes_order:
            return
        reported = json.loads(queue.config_json)
        reported["ordering"] = self.chance.choice((ANY_ORDER, PER_KEY))
        reported["batch_size"] = self.chance.choice((2, 4))
        self.engine.reconfigure_queue(queue, rules_of("one", reported), json.dumps(reported))
        self._count("orders changed")

    def seek(self) -> None:
        queue = self.engine.queues.get(self.chance.choice(("one", "two")))
        if queue is None or not queue.groups:
            return
        group = self.chance.choice(list(queue.groups.values()))
        floors = [
            self.chance.randrange(int(partition.next_seq) + 2) for partition in queue.partitions
        ]
        self._log_step(f"{group.name} of {queue.name} seeks {floors}")
        self.is_ending_groups = True
        self.engine.seek_group(group, floors)
        self.is_ending_groups = False
        self._count("seeks")
        gid = int(group.gid)
        for number, pair in self.oracle.pairs.items():
            if number[0] == gid:
                pair.attempts.reset(self.oracle.frame)
        for partition, floor in zip(queue.partitions, floors):
            pid = int(partition.pid)
            for number, pair in list(self.oracle.pairs.items()):
                if number[0] == gid and number[1] == pid and number[2] < floor:
                    self.oracle.settle(pair, PURGED)
            for seq, sent in sorted(self.places.get(pid, {}).items()):
                number = (gid, pid, seq)
                if seq >= floor and partition.holds(seq) and number not in self.oracle.pairs:
                    if partition.is_for_group(seq, gid):
                        self._revive(number, sent)

    def _revive(self, number: tuple[int, int, int], sent: Sent) -> None:
        pair = self.oracle.past.get(number)
        if pair is None:
            self.oracle.add(number[0], sent, (number[1], number[2]))
            pair = self.oracle.pairs[number]
            pair.states = [(0, ACKED), (self.oracle.frame, WAITS)]
        else:
            pair.become(WAITS, self.oracle.frame)
            self.oracle.revive(pair)
        pair.attempts.reset(self.oracle.frame)
        pair.targeted = True  # its place among those of its key is lost

    def drop_group(self) -> None:
        queue = self.engine.queues.get(self.chance.choice(("one", "two")))
        if queue is None or not queue.groups:
            return
        group = self.chance.choice(list(queue.groups.values()))
        gid = int(group.gid)
        self._log_step(f"group {group.name} of {queue.name} ({gid}) is dropped")
        self.is_ending_groups = True
        self.engine.delete_group(group)
        self.is_ending_groups = False
        self._count("groups dropped")
        self._forget_group(gid)
        self.group_frames[gid] = (self.oracle.frame, "dropped")
        self.purged_now.add(queue.name)

    def _forget_group(self, gid: int) -> None:
        self.consumers = [hand for hand in self.consumers if hand.group is not None]
        for number in [number for number in self.oracle.pairs if number[0] == gid]:
            self.oracle.settle(self.oracle.pairs[number], PURGED)
        for number in [number for number in self.oracle.in_flight if number[0] == gid]:
            raise Violation(f"{number} was not taken away with its group")

    def delete_queue(self) -> None:
        queue = self.engine.queues.get(self.chance.choice(("one", "two")))
        if queue is None:
            return
        gids = [int(group.gid) for group in queue.groups.values()]
        self._log_step(f"queue {queue.name} is deleted")
        self.is_ending_groups = True
        self.engine.delete_queue(queue)
        self.is_ending_groups = False
        self._count("queues deleted")
        for gid in gids:
            self._forget_group(gid)
            self.group_frames[gid] = (self.oracle.frame, "dropped")
        self.ids = {at: sent for at, sent in self.ids.items() if at[0] != queue.name}

    def purge(self) -> None:
        queue = self.engine.queues.get(self.chance.choice(("one", "two", "dlq/one", "dlq/two")))
        if queue is None:
            return
        self._log_step(f"{queue.name} is purged")
        self.touched_dead_letters = self.touched_dead_letters or queue.name.startswith("dlq/")
        self.engine.purge_queue(queue)
        self.purged_now.add(queue.name)
        self._count("purges")

    def redrive(self) -> None:
        dlq = self.engine.queues.get(self.chance.choice(("dlq/one", "dlq/two")))
        if dlq is None:
            return
        places = [
            (partition, seq)
            for partition in dlq.partitions
            for seq in range(int(partition.first_live(0)), int(partition.committed_end))
            if partition.holds(seq)
        ]
        if not places:
            return
        partition, seq = self.chance.choice(places)
        found: list[Message | None] = []
        self.runner.read_messages([(partition, seq)], found.extend)
        self._run_all()
        if not found or found[0] is None or not partition.holds(seq):
            return
        story = dict(decode_headers(found[0].headers))
        home = self.engine.queues.get(story["original-queue"])
        before = (
            {int(one.pid): int(one.next_seq) for one in home.partitions} if home is not None else {}
        )
        to_all = self.chance.random() < 0.3
        if not dead_letters.redrive(self.engine, partition, seq, found[0], to_all):
            if home is not None:
                raise Violation("a dead letter could not be put back")
            return
        assert home is not None
        self._count("redriven")
        self.touched_dead_letters = True
        key = b"*" if home.rules.ordering == STRICT else found[0].key
        serial = serial_of(found[0].payload)
        sent = Sent(
            serial,
            home.name,
            key,
            story.get("original-message-id", "").encode(),
            False,
            self.loop.now,
        )
        for one in home.partitions:
            for new in range(before[int(one.pid)], int(one.next_seq)):
                target = one.target_groups.get(new, 0)
                sent.expires = int(one.expires(new))
                sent.frame = self.oracle.frame
                self.places.setdefault(int(one.pid), {})[new] = sent
                for group in home.groups.values():
                    if target in (0, group.gid):
                        self.oracle.add(int(group.gid), sent, (int(one.pid), new), True)
                self._log_step(
                    f"letter {serial} goes back to {home.name} at {(one.pid, new)} for {target}"
                )

    # ---- time, and the end of it

    def pass_time(self) -> None:
        self.advance(self.chance.choice((0.01, 0.1, 1.0, 1.0, 5.0, 30.0, 400.0)))

    def advance(self, seconds: float) -> None:
        until = self.loop.now + seconds
        self.schedule.exact_from = self.loop.now if self.is_armed else 0.0
        while True:
            due = self.loop.next_timer()
            if due == 0.0 or due > until:
                break
            self.loop.now = max(self.loop.now, due)
            self.loop.fire_timers()
            if self.chance.random() < 0.5:
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
        self.store.release(self.chance.choice((1, 2, -1)))

    def crash(self) -> None:
        """The power goes, in the midst of whatever is under way."""
        keep = self.chance.randrange(self.store.unsynced() + 1)
        self._log_step(
            f"CRASH, keeps {keep} of {self.store.unsynced()}; durable {self.oracle.durable}"
        )
        self._count("crashes")
        self.store = self.store.crash(keep)
        self._start_again()

    def restart(self) -> None:
        """A stop in order: everything is kept."""
        self._log_step("restart")
        self._count("restarts")
        self.runner.close()
        self.oracle.durable = self.oracle.frames
        self._start_again()

    def _start_again(self) -> None:
        self.loop.clear()
        self.previous_run += [
            (held, self.places[held.number[1]][held.number[2]])
            for held in self.old
            if held.number[2] in self.places.get(held.number[1], {})
        ]
        del self.previous_run[:-100]
        self.consumers = []
        self.old = []
        self.by_tag = {}
        self.oracle.in_flight = {}
        self.schedule.restarted()
        self.dead_lettered_now = set()
        self.uncommitted_now = set()
        self._open()
        self._scan_queues()

    def _stop_all(self) -> None:
        """Let everything happen that happens by itself now; then no work may be left with room for it."""
        self.runner.end_turn()
        self._run_all()
        while 0.0 < self.loop.next_timer() <= self.loop.now:
            self.loop.fire_timers()
            self._run_all()
        self.runner.end_turn()
        self._run_all()
        self.counts["conserved"] = self.counts.get("conserved", 0) + self.conservation.check(
            self.engine, self.loop.now
        )

    def check_turn(self) -> None:
        """What has happened since the last time must have been right."""
        self._report(self.engine.alerts, self.engine.warnings)
        self.engine.alerts = []
        self.engine.warnings = []
        self.check()

    def step(self) -> None:
        self.steps += 1
        self.engine.now = self.loop.now
        self.unauthorized.try_one(self.engine, self.old)
        what = self.chance.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        self.doing = what
        getattr(self, what)()
        self.is_armed = self.is_armed and what == "pass_time"
        self.engine.now = self.loop.now
        if self.chance.random() < 0.8:
            self.runner.end_turn()
            self.is_armed = True
            self._run_some()
        self.check_turn()
        if self.chance.random() < 0.3:
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
    "crash": 1.5,
    "restart": 0.3,
}


def run(seed: int, steps: int, **fixed: Any) -> World:
    """One world; a violation is raised with the seed and the last things that happened."""
    world = World(seed, **fixed)
    try:
        for _ in range(steps):
            world.step()
        world.drain()
    except Exception as fault:
        tail = "\n".join(world.log[-60:])
        raise Violation(
            f"seed {seed}, step {world.steps}, {world.doing}: {fault}\n{tail}"
        ) from fault
    return world
