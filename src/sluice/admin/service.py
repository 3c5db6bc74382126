"""The admin service: what people and programs may ask of a running broker. REST, gRPC, console and command line are
doors onto it; it decides, they translate.

Every method runs on the broker's loop, gives up the loop from time to time when it is long, refuses with a
`SluiceError`, and answers a change only when the store has it. The work is done in the modules beside this one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from sluice.admin.queries.diagnosis import message_trace
from sluice.admin.queries.diagnosis import queue_diagnosis
from sluice.admin.queries import dead_letter_operations
from sluice.admin.queries import view_builders
from sluice.admin.queries import message_lookup
from sluice.admin.queries import owner_operations
from sluice.admin.queries import publish_operation
from sluice.admin.queries.diagnosis import phrases
from sluice.admin.bulk.bulk_service import BulkDesk
from sluice.admin.metrics.metrics_snapshot import Figures, Tally, gather
from sluice.admin.broker_facade import AT_ONCE, Hands, plain
from sluice.admin.queries.store_status import StoreDesk
from sluice.admin.views import (
    Biography,
    ConsumerView,
    Diagnosis,
    GroupView,
    LetterFilter,
    LossView,
    MessageView,
    NodeView,
    Outgoing,
    OwnerView,
    Published,
    QueueDetail,
    QueueView,
    Redriven,
    StoreView,
)
from sluice.broker.broker import Broker
from sluice.broker.namespaces.queues.handler import QueueDoor
from sluice.broker.namespaces.responses import refuse_queue
from sluice.errors import GroupExists, InUse, InvalidQueueConfig, UnknownGroup, UnknownMessage
from sluice.queues.engine import Engine
from sluice.queues.model.group import Group
from sluice.queues.model.ledger import verify_group, verify_queue
from sluice.queues.names import fault_of_new_group
from sluice.queues.commit_loop import Runner
from sluice.queues.bulk.start_position import start_floors


class AdminService:
    """`store_name` and `build` are what the node says of itself; `node` is its name. `direct`: the store has files that
    can be read by address."""

    def __init__(
        self,
        engine: Engine,
        runner: Runner,
        door: QueueDoor,
        broker: Broker,
        store_name: str,
        build: str,
        node: str = "local",
        direct: bool = False,
        store: StoreDesk | None = None,
    ) -> None:
        self._hands = Hands(engine, runner, door, broker)
        self._engine = engine
        self._door = door
        self._queues = door.service
        self._register = view_builders.Register(self._hands, door.service)
        self.bulk = BulkDesk(self._hands, self._register, direct)  # for programs that read and write in bulk
        self._store_name = store_name
        self._store = store if store is not None else StoreDesk(store_name, runner.segment_sizes)
        self._build = build
        self._node = node

    # ---- the node

    async def node(self) -> NodeView:
        self._hands.look()
        view = view_builders.node_view(self._hands, self._node, self._store_name, self._build)
        return replace(view, losses=len(self._store.losses()))

    async def nodes(self) -> list[NodeView]:
        return [await self.node()]

    async def store(self) -> StoreView:
        """What the messages are kept in, asked now."""
        return await self._store.view()

    async def recent_store(self) -> StoreView:
        """The same, perhaps some seconds old."""
        return await self._store.recent_view()

    async def losses(self) -> list[LossView]:
        """Confirmed frames that the store has lost, and that no operator has confirmed to know of."""
        return self._store.losses()

    async def confirm_loss(self, cell: int) -> LossView:
        """An operator knows of the loss of this cell: it is not reported any more."""
        return await self._store.confirm_loss(cell)

    async def figures(self, tally: Tally) -> Figures:
        """A copy of everything that is counted."""
        return await gather(self._hands, tally)

    # ---- queues

    async def list_queues(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[QueueView]:
        """By name, behind `after`."""
        self._hands.look()
        found: list[QueueView] = []
        for nth, name in enumerate(self._register.names(plain(prefix), plain(after), limit)):
            if nth % AT_ONCE == AT_ONCE - 1:
                await self._hands.breathe()
            queue = self._engine.queues.get(name)
            if queue is not None:
                found.append(view_builders.queue_view(queue, self._queues, self._register))
        return found

    async def create_queue(self, config: object) -> QueueDetail:
        """The answer is of the queue that was made, even if somebody has deleted it meanwhile."""
        refuse_queue(config)
        self._hands.begin()
        queue = self._queues.create(config)
        self._door.appeared(queue)
        await self._hands.kept()
        return view_builders.queue_detail(queue, self._queues, self._register)

    async def queue(self, name: str) -> QueueDetail:
        self._hands.look()
        return view_builders.queue_detail(self._hands.queue(name), self._queues, self._register)

    async def stats(self, name: str) -> QueueView:
        self._hands.look()
        return view_builders.queue_view(self._hands.queue(name), self._queues, self._register)

    async def delete_queue(self, name: str) -> None:
        queue = self._hands.queue(name)
        self._hands.begin()
        self._door.delete(queue)
        await self._hands.kept()

    async def config(self, name: str) -> dict[str, object]:
        return self._queues.config(self._hands.queue(name)).shown()

    async def configure(self, name: str, changes: object) -> dict[str, object]:
        """Change what is given; the whole configuration after it."""
        self._hands.begin()
        queue = self._queues.configure(plain(name), changes)
        self._door.bindings_changed()
        await self._hands.kept()
        return self._queues.config(queue).shown()

    async def purge(self, name: str) -> int:
        return await dead_letter_operations.purge_queue(self._hands, name)

    # ---- groups and consumers

    async def groups(self, name: str) -> list[GroupView]:
        self._hands.look()
        queue = self._hands.queue(name)
        return [view_builders.group_view(queue.groups[group]) for group in sorted(queue.groups)]

    async def group(self, name: str, group: str) -> GroupView:
        self._hands.look()
        return view_builders.group_view(self._group(name, group))

    def _group(self, name: str, group: str) -> Group:
        found = self._hands.queue(name).groups.get(group)
        if found is None:
            raise UnknownGroup(plain(name), group)
        return found

    async def create_group(self, name: str, group: str, start: str = "earliest") -> GroupView:
        queue = self._hands.queue(name)
        fault = fault_of_new_group(group)
        if not fault and not publish_operation.can_be_sent(group):
            fault = "Give text that an MQTT packet can carry: no zero character, no lone surrogates"
        if fault:
            raise InvalidQueueConfig(f"{group!r} cannot be a group", fault)
        if group in queue.groups:
            raise GroupExists(queue.name, group)
        self._hands.begin()
        self._engine.check_group(group, len(queue.partitions))
        made = self._engine.group(queue, group, start_floors(queue, start))
        await self._hands.kept()
        return view_builders.group_view(made)

    async def delete_group(self, name: str, group: str) -> None:
        found = self._group(name, group)
        if found.consumers:
            raise InUse(
                f"group {group!r} of queue {plain(name)!r} has {phrases.count_of(len(found.consumers), 'consumer')}",
                "Let its consumers unsubscribe or end their sessions first",
            )
        self._hands.begin()
        self._engine.drop_group(found)
        await self._hands.kept()

    async def consumers(self, name: str) -> list[ConsumerView]:
        self._hands.look()
        return [one for group in await self.groups(name) for one in group.consumers]

    async def seek(self, name: str, group: str, to: str) -> GroupView:
        """To `earliest`, `latest`, a sequence, or a time (ISO 8601, or @seconds since 1970)."""
        found = self._group(name, group)
        if not to:
            raise InvalidQueueConfig("seek needs a place", "Give earliest, latest, a sequence or a time")
        self._hands.begin()
        self._engine.seek(found, start_floors(found.queue, to))
        await self._hands.kept()
        return view_builders.group_view(found)

    # ---- messages

    async def peek(
        self,
        name: str,
        group: str = "",
        partition: int = -1,
        start: int = -1,
        limit: int = 50,
        payload_bytes: int = 65_536,
    ) -> list[MessageView]:
        """What is kept, oldest first; with a group, what that one has not settled. Nothing is taken or changed."""
        self._hands.look()
        queue = self._hands.queue(name)
        of_group = self._group(name, group) if group else None
        partitions = list(queue.partitions)
        if partition >= 0:
            if partition >= len(partitions):
                raise InvalidQueueConfig(
                    f"queue {queue.name!r} has no partition {partition}",
                    f"Give one from 0 to {len(partitions) - 1}",
                )
            partitions = [partitions[partition]]
        starts = [max(0, start)] * len(partitions)
        if of_group is not None:
            cursors = of_group.cursors
            starts = [max(start, int(cursors[int(one.number)].floor)) for one in partitions]
        places = message_lookup.oldest_first(partitions, starts)
        if of_group is not None:
            places = iter(await message_lookup.unsettled(self._hands, cursors, places, limit))
        found: list[MessageView] = []
        async for place, message in message_lookup.read_through(self._hands, islice(places, max(0, limit))):
            found.append(message_lookup.message_view(place, message, of_group, payload_bytes))
        return found

    async def message(self, name: str, message_id: str, payload_bytes: int = 1_048_576) -> MessageView:
        self._hands.look()
        queue = self._hands.queue(name)
        place = await message_lookup.locate(self._hands, queue, message_id)
        if place is not None:
            (message,) = await self._hands.read([place])
            if message is not None:
                return message_lookup.message_view(place, message, None, payload_bytes)
        raise UnknownMessage(queue.name, message_id)

    async def publish(self, name: str, outgoing: Outgoing) -> Published:
        return await publish_operation.publish(self._hands, name, outgoing)

    # ---- exclusive queues

    async def owners(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[OwnerView]:
        """By client id, behind `after`."""
        return await owner_operations.list_owners(self._hands, prefix, after, limit)

    async def owner(self, client: str) -> OwnerView:
        self._hands.look()
        return owner_operations.view_of(self._hands, owner_operations.find(self._hands, client))

    async def peek_owner(
        self, client: str, start: int = 0, limit: int = 50, payload_bytes: int = 65_536
    ) -> list[MessageView]:
        """What is kept for an owner, oldest first. Nothing is taken or changed."""
        return await owner_operations.peek(self._hands, client, start, limit, payload_bytes)

    async def purge_owner(self, client: str) -> int:
        return await owner_operations.purge(self._hands, client)

    # ---- dead letters

    async def dead_letters(
        self,
        name: str,
        wanted: LetterFilter | None = None,
        after: str = "",
        limit: int = 50,
        payload_bytes: int = 65_536,
    ) -> list[MessageView]:
        """Those of the queue `name`, oldest first, behind the letter `after`."""
        return await dead_letter_operations.list_letters(
            self._hands, name, wanted or LetterFilter(), after, limit, payload_bytes
        )

    async def dead_letter(self, name: str, message_id: str, payload_bytes: int = 1_048_576) -> MessageView:
        place, message = await dead_letter_operations.find_letter(self._hands, name, message_id)
        return message_lookup.message_view(place, message, None, payload_bytes)

    async def retry_dead_letter(self, name: str, message_id: str, to_all: bool = False) -> Redriven:
        return await dead_letter_operations.retry_one(self._hands, name, message_id, to_all)

    async def retry_dead_letters(
        self, name: str, wanted: LetterFilter | None = None, limit: int = 1000, to_all: bool = False
    ) -> Redriven:
        return await dead_letter_operations.retry_many(self._hands, name, wanted or LetterFilter(), limit, to_all)

    async def purge_dead_letters(self, name: str, wanted: LetterFilter | None = None) -> int:
        return await dead_letter_operations.purge(self._hands, name, wanted or LetterFilter())

    async def delete_dead_letter(self, name: str, message_id: str) -> None:
        await dead_letter_operations.delete(self._hands, name, message_id)

    # ---- why

    async def biography(self, name: str, message_id: str) -> Biography:
        self._hands.look()
        return await message_trace.biography(self._hands, name, message_id)

    async def find(self, message_id: str) -> list[str]:
        """The queues that know a message; none is no error."""
        self._hands.look()
        return await message_trace.find(self._hands, message_id)

    async def diagnose(self, name: str, group: str = "") -> Diagnosis:
        """Why nothing arrives."""
        self._hands.look()
        return await queue_diagnosis.diagnose(self._hands, self._register, name, group)

    async def verify(self) -> list[str]:
        """Everything that does not add up; nothing when all is well. Each queue is counted within one turn."""
        found: list[str] = []
        for name in list(self._register.all_names()):
            queue = self._engine.queues.get(name)
            if queue is None:
                continue
            found.extend(verify_queue(queue))
            for group in list(queue.groups.values()):
                await self._hands.breathe()
                if self._hands.lives(queue) and queue.groups.get(group.name) is group:
                    found.extend(verify_group(group))
            await self._hands.breathe()
        return found
