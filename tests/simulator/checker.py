"""Checks of the simulator.

After each step nothing is lost, duplicated, out of order or unaccounted for; after each restart
every message is in a possible state; and after a drain nothing is left.
"""

from __future__ import annotations

from sluice.message import Message, decode_headers
from sluice.queues.commit_loop import read_messages
from sluice.queues.model.delivery_lease import BACKOFF, DEAD_LETTERING
from sluice.queues.model.group import Group
from sluice.queues.model.ledger import verify
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.names import format_message_id
from tests.simulator.environment import Environment, serial_of
from tests.simulator.oracle import ABSENT, ACKED, DEAD, EXPIRED, PURGED, UNSETTLED, Pair, Violation
from tests.simulator.participants import SimulatedConsumer
from tests.simulator.schedule import ROUNDING_SECONDS, is_settled_by_all

# Serial and group of each dead letter, by the queue, partition and sequence that it comes from.
DeadLetters = dict[tuple[str, str, str], list[tuple[int, str]]]


class Checker(Environment):
    def _scan_queues(self) -> None:
        """Check after a restart that every message is in a possible state."""
        oracle = self.oracle
        durable = oracle.durable
        payloads = self._read_all()
        self.retention.restarted(payloads, durable)
        dead_letters = self._read_dead_letters()
        engine = self.engine
        for gid, (frame, what) in self.group_frames.items():
            if oracle.is_durable(frame) and (gid in engine.groups) != (what == "created"):
                raise Violation(
                    f"group {gid} was {what} durably, and exists: {gid in engine.groups}"
                )
        everything = {**oracle.pairs, **oracle.past}
        actual: set[tuple[int, int, int]] = set()
        for gid, group in engine.groups.items():
            for cursor in group.cursors:
                partition = cursor.partition
                seq = int(partition.first_live(cursor.low_watermark))
                while seq < partition.next_seq:
                    if partition.is_for_group(seq, gid) and not cursor.is_settled(seq):
                        actual.add((gid, int(partition.pid), seq))
                    seq = int(partition.first_live(seq + 1))
        for number, pair in everything.items():
            if number[0] not in engine.groups:
                oracle.drop(number)
                continue
            is_stored = number in actual
            if is_stored and payloads[number[1], number[2]] != pair.sent.serial:
                # Another message has its location: its own frame was lost.
                is_stored = False
                if UNSETTLED in pair.possible(durable)[:1]:
                    raise Violation(
                        f"{pair} is lost, and {payloads[number[1], number[2]]} has its location"
                    )
            possible = pair.possible(durable)
            if is_stored:
                if UNSETTLED not in possible:
                    raise Violation(f"{pair} has come back; durable {durable}")
                if DEAD in possible:
                    self._check_dead_letter(pair, dead_letters)
                actual.discard(number)
                pair.found(UNSETTLED)
                pair.attempts.recover(durable, self.loop.now)
                if number not in oracle.pairs:
                    oracle.revive(pair)
            else:
                if all(state == UNSETTLED for state in possible):
                    raise Violation(f"{pair} is lost; durable {durable}")
                if (
                    DEAD in possible
                    and ACKED not in possible
                    and self._expects_dead_letter(pair, possible)
                ):
                    self._check_dead(pair, dead_letters)
                oracle.drop(number)
        for number in actual:
            sent = self.locations.get(number[1], {}).get(number[2])
            made = self.group_frames.get(number[0])
            if sent is None or payloads[number[1], number[2]] != sent.serial:
                raise Violation(
                    f"{number} came from nowhere with payload {payloads[number[1], number[2]]}"
                )
            if made is not None and made[1] == "dropped":
                pair = oracle.add(number[0], sent, (number[1], number[2]), True)
                pair.found(UNSETTLED)
                continue
            raise Violation(
                f"{number} (message {sent.serial}) is unsettled, and the oracle does not know it"
            )
        self.group_frames = dict.fromkeys(engine.groups, (0, "created"))
        oracle.past = {}
        for sent in self.ids.values():
            if not oracle.is_durable(sent.frame):
                sent.is_id_lost = True
        before = self.locations
        self.locations = {}
        for queue in engine.queues.values():
            for partition in queue.partitions:
                for seq in range(int(partition.first_live(0)), int(partition.next_seq)):
                    if partition.holds(seq) and not queue.name.startswith("dlq/"):
                        serial = payloads[int(partition.pid), seq]
                        sent = before.get(int(partition.pid), {}).get(seq)
                        if sent is None or sent.serial != serial:
                            raise Violation(f"{serial} is stored, and was never sent there")
                        sent.frame = 0
                        sent.recover(durable)
                        self.locations.setdefault(int(partition.pid), {})[seq] = sent
        self.check()

    def _name_of(self, pair: Pair) -> str:
        if pair.sent.own_id:
            return pair.sent.own_id.decode()
        return format_message_id(*pair.location).decode()

    def _origin_of(self, pair: Pair) -> tuple[str, str, str]:
        """Return the origin in the headers of a dead letter of the message.

        Its id does not tell: a redriven dead letter has the id of the original message.
        """
        pid, seq = pair.location
        return pair.sent.queue, str(self.engine.partitions[pid].number), str(seq)

    def _expects_dead_letter(self, pair: Pair, possible: list[str]) -> bool:
        """Return whether an untouched dead letter is the only possible result."""
        queue = self.engine.queues.get(pair.sent.queue)
        return (
            queue is not None
            and possible[-1] == DEAD
            and ABSENT not in possible
            and PURGED not in possible
            and EXPIRED not in possible
            and bool(queue.rules.dlq_enabled)
            and not self.has_touched_dead_letters
        )

    def _check_dead_letter(self, pair: Pair, dead_letters: DeadLetters) -> None:
        """Check that an unsettled message is not among the dead letters."""
        group = self.engine.groups[pair.gid].name
        if pair.targeted or len(self.gids_of.get((pair.sent.queue, group), ())) > 1:
            return  # it may have been dead-lettered before
        for serial, who in dead_letters.get(self._origin_of(pair), []):
            if serial == pair.sent.serial and who in (group, ""):
                raise Violation(f"{pair} is unsettled, and is among the dead letters")

    def _check_dead(self, pair: Pair, dead_letters: DeadLetters) -> None:
        group = self.engine.groups[pair.gid].name
        for serial, who in dead_letters.get(self._origin_of(pair), []):
            if serial == pair.sent.serial and who in (group, ""):
                return
        raise Violation(f"{pair} is dead, and in no dead-letter queue")

    def _read_all(self) -> dict[tuple[int, int], int]:
        """Return the serial of every stored message, by location."""
        locations: list[tuple[Partition, int]] = []
        for partition in self.engine.partitions.values():
            seq = int(partition.first_live(0))
            while seq < partition.next_seq:
                locations.append((partition, seq))
                seq = int(partition.first_live(seq + 1))
        found: list[Message | None] = []
        read_messages(self.commit_loop, locations, found.extend)
        self._run_all()
        serials: dict[tuple[int, int], int] = {}
        for (partition, seq), message in zip(locations, found, strict=True):
            if message is None:
                raise Violation(f"message {seq} of partition {partition.pid} cannot be read")
            serials[int(partition.pid), seq] = serial_of(message.payload)
        return serials

    def _read_dead_letters(self) -> DeadLetters:
        dead_letters: DeadLetters = {}
        for name, queue in self.engine.queues.items():
            if not name.startswith("dlq/"):
                continue
            for partition in queue.partitions:
                locations = [
                    (partition, seq)
                    for seq in range(int(partition.first_live(0)), int(partition.next_seq))
                    if partition.holds(seq)
                ]
                found: list[Message | None] = []
                read_messages(self.commit_loop, locations, found.extend)
                self._run_all()
                for message in found:
                    assert message is not None
                    headers = dict(decode_headers(message.headers))
                    at = (
                        headers["original-queue"],
                        headers.get("original-partition", ""),
                        headers.get("original-sequence", ""),
                    )
                    dead_letters.setdefault(at, []).append(
                        (serial_of(message.payload), headers.get("original-group", ""))
                    )
        return dead_letters

    def check(self) -> None:
        """Check that unsettled messages are stored, and that settled ones have a reason."""
        engine = self.engine
        oracle = self.oracle
        for number, pair in list(oracle.pairs.items()):
            group = engine.groups.get(number[0])
            if group is None:
                oracle.drop(number)
                continue
            if self._is_unsettled(pair):
                if number in self.acked_now:
                    raise Violation(f"{pair} was acked, and is not settled")
                if number in self.schedule.exhausted and self._lease_state(pair) != DEAD_LETTERING:
                    raise Violation(
                        f"{pair} has failed {pair.attempts.counts()} times, and is not dead"
                    )
                continue
            oracle.settle(pair, self._reason(pair, group))
        self.schedule.exhausted.clear()
        self.retention.changed |= self.purged_now
        self.acked_now.clear()
        self.dead_lettered_now.clear()
        self.uncommitted_now.clear()
        self.purged_now.clear()
        faults = verify(engine.queues)
        if faults:
            raise Violation("; ".join(faults))

    def check_times(self, all_read: bool = False) -> None:
        """Check that nothing is late when all timers have fired. `all_read`: no reads pending."""
        schedule = self.schedule
        schedule.check_deadlines(self._rules_of)
        for number, pair in self.oracle.pairs.items():
            rules = self._rules_of(number[0])
            if rules is None or not schedule.is_free(number) or not self._is_unsettled(pair):
                continue
            state = self._lease_state(pair)
            if state == DEAD_LETTERING and not all_read:
                continue
            if state == BACKOFF and schedule.must_be_ready(pair.attempts):
                raise Violation(f"the retry of {pair} is due, and it still waits for its retry")
            if schedule.must_be_given_up(pair.attempts, rules):
                raise Violation(f"{pair} is past its total timeout, and is not dead")
            if schedule.must_be_expired(pair) and (all_read or not rules.expired_to_dlq):
                raise Violation(f"{pair} expired at {pair.sent.latest_expires}, and is unsettled")
            partition = self.engine.partitions[number[1]]
            if pair.sent.due and number[2] in partition.delayed_seqs:
                latest = max(pair.sent.due, pair.sent.latest_due)
                if self.loop.now > latest + ROUNDING_SECONDS:
                    raise Violation(f"the delay of {pair} is over, and it is still held back")
        self._check_retention()

    def _rules_of(self, gid: int) -> QueueRules | None:
        group = self.engine.groups.get(gid)
        return group.queue.rules if group is not None else None

    def _lease_state(self, pair: Pair) -> int:
        """Return the lease state of an unsettled message; -1 if it was never delivered."""
        pid, seq = pair.location
        cursor = self.engine.groups[pair.gid].cursors[self.engine.partitions[pid].number]
        lease = cursor.leases.get(seq)
        return -1 if lease is None else int(lease.state)

    def _check_retention(self) -> None:
        """Check that settled messages are stored for their retention, and no longer."""
        pairs = self.oracle.pairs
        for pid, sequences in self.locations.items():
            partition = self.engine.partitions.get(pid)
            if partition is None:
                continue
            queue = partition.queue
            gids = [int(group.gid) for group in queue.groups.values()]
            retains = queue.rules.retention > 0.0 and len(gids) > 0
            for seq, sent in sequences.items():
                location = (pid, seq)
                if partition.holds(seq):
                    if retains and is_settled_by_all(location, gids, pairs):
                        self.retention.check_retained(location, sent, queue.rules)
                    else:
                        self.retention.wanted(location)
                elif not self.retention.is_removed(location):
                    self.retention.removed(location, sent, queue.rules, self.oracle.frame)
        self.retention.end_check()

    def _reason(self, pair: Pair, group: Group) -> str:
        number = (pair.gid, *pair.location)
        if number in self.acked_now:
            return ACKED
        location = (str(self.engine.partitions[pair.location[0]].number), str(pair.location[1]))
        for who in (group.name, ""):
            if (pair.sent.queue, *location, who) in self.dead_lettered_now:
                return DEAD
        if (pair.sent.queue, self._name_of(pair)) in self.uncommitted_now:
            return DEAD
        if pair.sent.queue in self.purged_now:
            return PURGED
        if pair.sent.expires and pair.sent.expires <= self.loop.now:
            return EXPIRED
        raise Violation(f"{pair} is deleted without a reason")

    def _leave(self, consumer: SimulatedConsumer) -> None:
        self._log_step(f"{consumer} leaves")
        self.consumers.remove(consumer)
        for number, held in consumer.holds.items():
            self.failed(number, 0.0, int(held.lease.attempt), is_by_consumer=False)
            self.returned(number)
        consumer.holds = {}
        self.engine.dispatch.leave(consumer)

    def drain(self) -> None:
        """Stop all faults and settle everything: nothing may be left."""
        self._log_step("drain")
        self.store.release()
        self._run_all()
        self.policies.lift(self.engine)
        self.key_holds.forget([int(gid) for gid in self.engine.groups])
        for consumer in list(self.consumers):
            self._leave(consumer)
        self.commit_loop.end_turn()
        self._run_all()
        self.check()
        for name in ("one", "two"):
            queue = self.engine.queues.get(name)
            for group in list(queue.groups.values()) if queue is not None else []:
                assert queue is not None
                self.clients += 1
                consumer = SimulatedConsumer(self, f"good{self.clients}", 1000, 0)
                self.consumers.append(consumer)
                self.engine.dispatch.join(group, consumer)
        idle_rounds = 300
        while idle_rounds > 0:
            self.commit_loop.end_turn()
            self._run_all()
            busy = False
            for consumer in self.consumers:
                for held in list(consumer.holds.values()):
                    busy = True
                    self.engine.settlement.ack(held.lease)
                    self.acked(held.number)
                    self.returned(held.number)
                    consumer.holds.pop(held.number)
            self.check()
            if not busy:
                idle_rounds -= 1
                if not self.oracle.pairs:
                    break
                self.loop.now += 50.0
                while 0.0 < self.loop.next_timer() <= self.loop.now:
                    self.loop.fire_timers()
                    self._run_all()
                self.check()
                self.check_times(all_read=True)
        if self.oracle.pairs:
            raise Violation(f"never delivered: {list(self.oracle.pairs.values())[:5]}")
        for gid, group in self.engine.groups.items():
            for cursor in group.cursors:
                is_clean = not cursor.settled_seqs or group.queue.rules.retention > 0.0
                if cursor.leases or cursor.active_by_key() or cursor.in_flight or not is_clean:
                    raise Violation(
                        f"group {gid}: leases or settlements are left "
                        f"in partition {cursor.partition.number}"
                    )
        for consumer in list(self.consumers):
            self._leave(consumer)
        self.counts["keys held"] = self.key_holds.count
        self._count("rests")
