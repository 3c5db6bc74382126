"""The admin service: all operations on a running broker that people and programs may request.

REST, gRPC, console and command line translate; this service decides. Every method runs on the
broker's loop, yields it from time to time when it is long, refuses with a `SluiceError`, and
answers a change only when the store has committed it. The modules beside this one do the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from sluice.admin import model
from sluice.admin.broker_facade import BATCH_SIZE, BrokerFacade, strip_queue_prefix
from sluice.admin.bulk import BulkService
from sluice.admin.metrics import (
    CounterSample,
    MetricsSnapshot,
    sample_counters,
    take_snapshot,
)
from sluice.admin.model import (
    Commanded,
    DeadLetterFilter,
    Diagnosis,
    MessageFilter,
    MessageTrace,
    OutgoingMessage,
    Published,
    QueueDetail,
    Redriven,
)
from sluice.admin.queries import (
    RecentFlow,
    StoreStatus,
    client_operations,
    dead_letter_operations,
    message_lookup,
    message_trace,
    owner_operations,
    phrases,
    publish_operation,
    queue_diagnosis,
    schedule_operations,
    view_builders,
    waiting_messages,
)
from sluice.broker.broker import Broker
from sluice.broker.namespaces import QueueHandler, refuse_reserved_name
from sluice.errors import GroupExists, InUse, InvalidQueueConfig, UnknownGroup, UnknownMessage
from sluice.queues.bulk import resolve_start
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.model import Group
from sluice.queues.names import new_group_name_error
from sluice.queues.service import GroupInspector


class AdminService:
    """Operations on one broker.

    `node`, `store_name` and `build` describe the node. `has_segment_files`: the store has files
    that can be read by address.
    """

    def __init__(
        self,
        engine: Engine,
        commit_loop: CommitLoop,
        queue_handler: QueueHandler,
        broker: Broker,
        store_name: str,
        build: str,
        node: str = "local",
        has_segment_files: bool = False,
        store_status: StoreStatus | None = None,
    ) -> None:
        self._facade = BrokerFacade(engine, commit_loop, queue_handler, broker)
        self._flow = RecentFlow()
        self._engine = engine
        self._queue_handler = queue_handler
        self._queue_service = queue_handler.service
        self._inspector = self._facade.inspector
        # For bulk readers and writers.
        self.bulk = BulkService(self._facade, has_segment_files)
        self._store_name = store_name
        self._store_status = (
            store_status
            if store_status is not None
            else StoreStatus(store_name, commit_loop.segment_sizes)
        )
        self._build = build
        self._node = node

    # ---- the node

    async def node(self) -> model.Node:
        self._facade.sync_clock()
        view = view_builders.build_node_view(
            self._facade, self._node, self._store_name, self._build
        )
        return replace(view, losses=len(self._store_status.losses()))

    async def nodes(self) -> list[model.Node]:
        return [await self.node()]

    async def store(self) -> model.Store:
        """Ask the store for its current status."""
        return await self._store_status.view()

    async def recent_store(self) -> model.Store:
        """Return the status of the store, at most some seconds old."""
        return await self._store_status.recent_view()

    async def losses(self) -> list[model.Loss]:
        """Return lost committed frames that no operator has confirmed."""
        return self._store_status.losses()

    async def confirm_loss(self, cell: int) -> model.Loss:
        """Record that an operator knows of the loss of this cell; it is no longer reported."""
        return await self._store_status.confirm_loss(cell)

    async def collect_metrics(self) -> MetricsSnapshot:
        """Return a copy of all counters."""
        return await take_snapshot(self._facade)

    async def sample_counters(self, max_queues: int) -> CounterSample:
        """Return the counters that charts are drawn from, of at most `max_queues` queues."""
        sample = await sample_counters(self._facade, self._flow.add, max_queues)
        self._flow.end_samples()
        return sample

    # ---- queues

    async def list_queues(
        self, prefix: str = "", after: str = "", limit: int = 1000
    ) -> list[model.Queue]:
        """Return queues by name, starting after `after`."""
        self._facade.sync_clock()
        found: list[model.Queue] = []
        for nth, name in enumerate(
            self._inspector.list_names(strip_queue_prefix(prefix), strip_queue_prefix(after), limit)
        ):
            if nth % BATCH_SIZE == BATCH_SIZE - 1:
                await self._facade.yield_to_loop()
            queue = self._inspector.find(name)
            if queue is not None:
                found.append(queue.view())
        return found

    async def create_queue(self, config: object) -> QueueDetail:
        """Create a queue and return it, even if it is deleted meanwhile."""
        refuse_reserved_name(config)
        self._facade.begin_change()
        queue = self._queue_service.create(config)
        self._queue_handler.on_queue_created(queue)
        created = self._facade.inspect(queue.name)
        await self._facade.wait_committed()
        return created.detail()

    async def queue(self, name: str) -> QueueDetail:
        self._facade.sync_clock()
        return self._facade.inspect(name).detail()

    async def stats(self, name: str) -> model.Queue:
        self._facade.sync_clock()
        return self._facade.inspect(name).view()

    async def delete_queue(self, name: str) -> None:
        queue = self._facade.get_queue(name)
        self._facade.begin_change()
        self._queue_handler.delete_queue(queue)
        await self._facade.wait_committed()

    async def config(self, name: str) -> dict[str, object]:
        return self._queue_service.config_of(self._facade.get_queue(name)).as_dict()

    async def configure(self, name: str, changes: object) -> dict[str, object]:
        """Change the given settings; return the complete configuration."""
        self._facade.begin_change()
        queue = self._queue_service.configure(strip_queue_prefix(name), changes)
        self._queue_handler.rebuild_bindings()
        await self._facade.wait_committed()
        return self._queue_service.config_of(queue).as_dict()

    async def purge(self, name: str, older_than: float = 0.0, keep_newest: int = 0) -> int:
        """Delete messages: all, or those older than some seconds and not among the newest."""
        return await dead_letter_operations.purge_queue(self._facade, name, older_than, keep_newest)

    async def pause_queue(self, name: str, by: str, reason: str) -> model.Queue:
        """Deliver nothing more of a queue; publishes and settlements go on."""
        queue = self._facade.get_queue(name)
        self._facade.begin_change()
        self._engine.delivery_control.pause_queue(queue, by, reason)
        await self._facade.wait_committed()
        return await self.stats(name)

    async def resume_queue(self, name: str) -> model.Queue:
        queue = self._facade.get_queue(name)
        self._facade.begin_change()
        self._engine.delivery_control.resume_queue(queue)
        await self._facade.wait_committed()
        return await self.stats(name)

    # ---- groups and consumers

    async def groups(self, name: str) -> list[model.Group]:
        self._facade.sync_clock()
        return self._facade.inspect(name).group_views()

    async def group(self, name: str, group: str) -> model.Group:
        self._facade.sync_clock()
        return self._inspect_group(name, group).view()

    def _inspect_group(self, name: str, group: str) -> GroupInspector:
        found = self._facade.inspect(name).find_group(group)
        if found is None:
            raise UnknownGroup(strip_queue_prefix(name), group)
        return found

    async def _command_group(
        self, name: str, group: str, command: Callable[[Group], object]
    ) -> model.Group:
        """Apply a command to a group; return the group after the commit."""
        inspector = self._inspect_group(name, group)
        self._facade.begin_change()
        command(self._facade.get_queue(name).groups[group])
        await self._facade.wait_committed()
        return inspector.view()

    async def create_group(self, name: str, group: str, start: str = "earliest") -> model.Group:
        queue = self._facade.get_queue(name)
        fault = new_group_name_error(group)
        if not fault and not publish_operation.is_valid_mqtt_text(group):
            fault = "Give text that an MQTT packet can carry: no zero character, no lone surrogates"
        if fault:
            raise InvalidQueueConfig(f"{group!r} is not a valid group name", fault)
        if group in queue.groups:
            raise GroupExists(queue.name, group)
        self._facade.begin_change()
        self._engine.lifecycle.check_group_limit(group, len(queue.partitions))
        self._engine.lifecycle.get_or_create_group(queue, group, resolve_start(queue, start))
        created = self._inspect_group(name, group)
        await self._facade.wait_committed()
        return created.view()

    async def pause_group(self, name: str, group: str, by: str, reason: str) -> model.Group:
        """Deliver nothing more to one group."""
        control = self._engine.delivery_control
        return await self._command_group(
            name, group, lambda found: control.pause_group(found, by, reason)
        )

    async def resume_group(self, name: str, group: str) -> model.Group:
        return await self._command_group(name, group, self._engine.delivery_control.resume_group)

    async def delete_group(self, name: str, group: str) -> None:
        members = self._inspect_group(name, group).members()
        if members:
            raise InUse(
                f"group {group!r} of queue {strip_queue_prefix(name)!r} has"
                f" {phrases.pluralize(len(members), 'consumer')}",
                "Let its consumers unsubscribe or end their sessions first",
            )
        self._facade.begin_change()
        self._engine.lifecycle.delete_group(self._facade.get_queue(name).groups[group])
        await self._facade.wait_committed()

    async def consumers(self, name: str) -> list[model.Consumer]:
        self._facade.sync_clock()
        return [one for group in await self.groups(name) for one in group.consumers]

    async def seek(self, name: str, group: str, to: str) -> model.Group:
        """Seek to `earliest`, `latest`, a sequence or a time (ISO 8601, or @seconds since 1970)."""
        self._inspect_group(name, group)
        if not to:
            raise InvalidQueueConfig(
                "seek needs a position", "Give earliest, latest, a sequence or a time"
            )
        return await self._command_group(
            name,
            group,
            lambda found: self._engine.lifecycle.seek_group(found, resolve_start(found.queue, to)),
        )

    # ---- messages

    async def peek(
        self,
        name: str,
        group: str = "",
        partition: int = -1,
        start: int = -1,
        limit: int = 50,
        payload_bytes: int = 65_536,
    ) -> list[model.Message]:
        """Return stored messages, oldest first; with a group, those it has not settled.

        Takes and changes nothing.
        """
        self._facade.sync_clock()
        queue = self._facade.inspect(name)
        selected_group = self._inspect_group(name, group) if group else None
        if partition >= queue.count_partitions():
            raise InvalidQueueConfig(
                f"queue {queue.name!r} has no partition {partition}",
                f"Give one from 0 to {queue.count_partitions() - 1}",
            )
        locations = queue.locations_from(partition, start, group)
        if selected_group is not None:
            locations = iter(
                await message_lookup.find_unsettled(self._facade, selected_group, locations, limit)
            )
        found: list[model.Message] = []
        async for location, message in message_lookup.read_in_batches(
            self._facade, islice(locations, max(0, limit))
        ):
            found.append(
                message_lookup.build_message_view(location, message, payload_bytes, selected_group)
            )
        return found

    async def message(
        self, name: str, message_id: str, payload_bytes: int = 1_048_576
    ) -> model.Message:
        self._facade.sync_clock()
        queue = self._facade.inspect(name)
        location = await message_lookup.locate_message(self._facade, queue, message_id)
        if location is not None:
            (message,) = await self._facade.read_messages([location])
            if message is not None:
                return message_lookup.build_message_view(location, message, payload_bytes)
        raise UnknownMessage(queue.name, message_id)

    async def publish(self, name: str, outgoing: OutgoingMessage) -> Published:
        return await publish_operation.publish(self._facade, name, outgoing)

    async def cancel_message(self, name: str, message_id: str, by: str) -> None:
        """Remove a message that waits, is delayed or waits for a retry, for all groups."""
        command = waiting_messages.cancel_command(self._facade, by)
        await waiting_messages.apply_to_one(self._facade, name, message_id, command)

    async def cancel_messages(
        self, name: str, criteria: MessageFilter, limit: int, dry_run: bool, by: str
    ) -> Commanded:
        command = waiting_messages.cancel_command(self._facade, by)
        return await waiting_messages.apply_to_many(
            self._facade, name, criteria, limit, dry_run, command
        )

    async def reschedule_message(
        self, name: str, message_id: str, delay: float | None, deliver_at: float, by: str
    ) -> model.Message:
        """Deliver a message after `delay` seconds (0.0: now), or at a time; return it."""
        command = waiting_messages.reschedule_command(self._facade, by, delay, deliver_at)
        location = await waiting_messages.apply_to_one(self._facade, name, message_id, command)
        return await waiting_messages.show_message(self._facade, location)

    async def reschedule_messages(
        self,
        name: str,
        criteria: MessageFilter,
        limit: int,
        dry_run: bool,
        delay: float | None,
        deliver_at: float,
        by: str,
    ) -> Commanded:
        command = waiting_messages.reschedule_command(self._facade, by, delay, deliver_at)
        return await waiting_messages.apply_to_many(
            self._facade, name, criteria, limit, dry_run, command
        )

    # ---- schedules

    async def schedules(self, name: str = "") -> list[model.Schedule]:
        """Return the schedules of a queue, or of all."""
        return schedule_operations.list_schedules(self._facade, name)

    async def schedule(self, name: str, schedule: str) -> model.Schedule:
        return schedule_operations.show(self._facade, name, schedule)

    async def store_schedule(
        self, name: str, given: model.NewSchedule, by: str, replaces: bool
    ) -> model.Schedule:
        """Add a schedule to a queue, or replace one."""
        return await schedule_operations.store(self._facade, name, given, by, replaces)

    async def remove_schedule(self, name: str, schedule: str) -> None:
        await schedule_operations.remove(self._facade, name, schedule)

    async def pause_schedule(
        self, name: str, schedule: str, by: str, reason: str
    ) -> model.Schedule:
        return await schedule_operations.pause(self._facade, name, schedule, by, reason)

    async def resume_schedule(self, name: str, schedule: str) -> model.Schedule:
        return await schedule_operations.resume(self._facade, name, schedule)

    async def run_schedule(self, name: str, schedule: str) -> model.ScheduleRun:
        return await schedule_operations.run_now(self._facade, name, schedule)

    # ---- exclusive queues

    async def owners(
        self, prefix: str = "", after: str = "", limit: int = 1000
    ) -> list[model.Owner]:
        """Return owners by client id, starting after `after`."""
        return await owner_operations.list_owners(self._facade, prefix, after, limit)

    async def owner(self, client: str) -> model.Owner:
        self._facade.sync_clock()
        return owner_operations.build_owner_view(
            self._facade, owner_operations.find_owner(self._facade, client)
        )

    async def peek_owner(
        self, client: str, start: int = 0, limit: int = 50, payload_bytes: int = 65_536
    ) -> list[model.Message]:
        """Return the stored values of an owner, oldest first. Takes and changes nothing."""
        return await owner_operations.peek_owner(self._facade, client, start, limit, payload_bytes)

    async def purge_owner(self, client: str) -> int:
        return await owner_operations.purge_owner(self._facade, client)

    # ---- clients

    async def clients(
        self,
        prefix: str = "",
        after: str = "",
        limit: int = 1000,
        connected: bool | None = None,
        user: str = "",
    ) -> list[model.Client]:
        """Return clients and persistent sessions by client id, starting after `after`."""
        return await client_operations.list_clients(
            self._facade, prefix, after, limit, connected, user
        )

    async def client(self, client: str) -> model.ClientDetail:
        self._facade.sync_clock()
        return client_operations.build_client_detail(
            client_operations.find_session(self._facade, client)
        )

    def has_session(self, client: str) -> bool:
        """Return whether the session of a client is in this cell."""
        return client_operations.has_session(self._facade, client)

    async def kick_client(self, client: str, end_session: bool = False) -> model.Kicked:
        return await client_operations.kick_client(self._facade, client, end_session)

    # ---- dead letters

    async def dead_letters(
        self,
        name: str,
        criteria: DeadLetterFilter | None = None,
        after: str = "",
        limit: int = 50,
        payload_bytes: int = 65_536,
    ) -> list[model.Message]:
        """Return the dead letters of a queue after the dead letter `after`, oldest first."""
        return await dead_letter_operations.list_dead_letters(
            self._facade, name, criteria or DeadLetterFilter(), after, limit, payload_bytes
        )

    async def dead_letter(
        self, name: str, message_id: str, payload_bytes: int = 1_048_576
    ) -> model.Message:
        location, message = await dead_letter_operations.find_dead_letter(
            self._facade, name, message_id
        )
        return message_lookup.build_message_view(location, message, payload_bytes)

    async def dead_letter_errors(
        self, name: str, criteria: DeadLetterFilter | None = None, limit: int = 10_000
    ) -> model.DeadLetterErrors:
        """Return the dead letters of a queue grouped by error, the most frequent first."""
        return await dead_letter_operations.group_by_error(
            self._facade, name, criteria or DeadLetterFilter(), limit
        )

    async def retry_dead_letter(
        self, name: str, message_id: str, to_all: bool = False, payload: bytes | None = None
    ) -> Redriven:
        """Redrive one dead letter; `payload` replaces that of the message."""
        return await dead_letter_operations.retry_dead_letter(
            self._facade, name, message_id, to_all, payload
        )

    async def retry_dead_letters(
        self,
        name: str,
        criteria: DeadLetterFilter | None = None,
        limit: int = 1000,
        to_all: bool = False,
    ) -> Redriven:
        return await dead_letter_operations.retry_dead_letters(
            self._facade, name, criteria or DeadLetterFilter(), limit, to_all
        )

    async def purge_dead_letters(self, name: str, criteria: DeadLetterFilter | None = None) -> int:
        return await dead_letter_operations.purge_dead_letters(
            self._facade, name, criteria or DeadLetterFilter()
        )

    async def delete_dead_letter(self, name: str, message_id: str) -> None:
        await dead_letter_operations.delete_dead_letter(self._facade, name, message_id)

    # ---- diagnosis

    async def trace_message(self, name: str, message_id: str) -> MessageTrace:
        self._facade.sync_clock()
        return await message_trace.trace_message(self._facade, name, message_id)

    async def find(self, message_id: str) -> list[str]:
        """Return the queues that know a message; an empty list is not an error."""
        self._facade.sync_clock()
        return await message_trace.find_queues_of_message(self._facade, message_id)

    async def diagnose(self, name: str, group: str = "") -> Diagnosis:
        """Find out why nothing arrives."""
        self._facade.sync_clock()
        return await queue_diagnosis.diagnose(self._facade, self._flow, name, group)

    async def verify(self) -> list[str]:
        """Return all inconsistencies; each queue is counted within one turn."""
        found: list[str] = []
        for name in list(self._inspector.all_names()):
            queue = self._inspector.find(name)
            if queue is None:
                continue
            found.extend(queue.verify())
            for group in queue.groups():
                await self._facade.yield_to_loop()
                if queue.is_current() and group.is_current():
                    found.extend(group.verify())
            await self._facade.yield_to_loop()
        return found
