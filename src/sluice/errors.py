"""All errors that Sluice reports.

An error carries what happened (its message) and what to do about it (`remedy`). It does not know
the APIs: MQTT, HTTP and gRPC each have one table that maps error classes to their codes. The
exception is `ProtocolViolation` and its subclasses: they are about MQTT itself, so they carry the
reason code that the specification assigns.
"""

from __future__ import annotations

import errno


class SluiceError(Exception):
    """The base class of all errors that Sluice reports."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}" if self.remedy else self.what


class ConfigError(SluiceError):
    """The configuration is not valid."""


class ProtocolViolation(SluiceError):
    """The peer violated MQTT; its connection ends with `reason`, and no state changes."""

    reason: int = 0x82  # Protocol Error

    def __init__(self, what: str, remedy: str = "", reason: int = 0) -> None:
        super().__init__(what, remedy)
        if reason:
            self.reason = reason


class MalformedPacket(ProtocolViolation):
    """The bytes are not a valid packet."""

    reason = 0x81


class PacketTooLarge(ProtocolViolation):
    """The packet exceeds the limit; detected from the fixed header, before the body is buffered."""

    reason = 0x95

    def __init__(self, length: int, limit: int, is_connect: bool = False) -> None:
        super().__init__(
            f"a packet of {length} bytes is larger than the {limit} allowed "
            + ("before authentication" if is_connect else "here"),
            "Connect first: larger packets are accepted after authentication"
            if is_connect
            else "Send smaller packets, or raise mqtt.max_packet_size on the server",
        )
        self.length = length
        self.limit = limit


class InvalidTopic(ProtocolViolation):
    """A topic name with a wildcard, or one that no server could route."""

    reason = 0x90


class UnsupportedVersion(ProtocolViolation):
    """A CONNECT for a protocol that is neither MQTT 3.1.1 nor MQTT 5.0."""

    reason = 0x84

    def __init__(self, name: str, level: int) -> None:
        super().__init__(
            f"protocol {name[:16]!r} level {level} is not supported",
            "Connect with MQTT 3.1.1 or MQTT 5.0",
        )
        self.level = level


class StoreError(SluiceError):
    """The store cannot be used."""


class StoreLocked(StoreError):
    def __init__(self, directory: str, holder: str) -> None:
        super().__init__(
            f"the store in {directory} is open in another process"
            + (f", process {holder}" if holder else ""),
            "Stop that process, or use another directory for this one",
        )
        self.directory = directory


_REMEDY_PERMISSIONS = (
    "Give the user that runs the broker write access (`ls -ld` shows the permissions, `mount` "
    "whether "
    "the disk is read-only), or choose another directory: --data DIR"
)
_REMEDY_DIRECTORY = "Use a directory, or a path where one can be created: --data DIR"
_REMEDY_DISK_FULL = (
    "Free space on that disk: a start needs a little. Everything acknowledged is stored"
)
_REMEDIES = {
    errno.EACCES: _REMEDY_PERMISSIONS,
    errno.EPERM: _REMEDY_PERMISSIONS,
    errno.EROFS: _REMEDY_PERMISSIONS,
    errno.ENOTDIR: _REMEDY_DIRECTORY,
    errno.EEXIST: _REMEDY_DIRECTORY,
    errno.ENOSPC: _REMEDY_DISK_FULL,
    errno.EDQUOT: _REMEDY_DISK_FULL,
    errno.EIO: (
        "The disk reports errors: repair it, or copy the directory to another disk, and start again"
    ),
    errno.EMFILE: "Raise the limit of open files (ulimit -n), and start again",
}


class StoreUnknown(StoreError):
    """The store was written by a Sluice with another file layout."""

    def __init__(self, directory: str, found: str, known: int) -> None:
        super().__init__(
            f"the store in {directory} has layout {found}, and this Sluice supports layout {known}",
            "Open it with the version of Sluice that wrote it",
        )
        self.directory = directory


class StoreDamaged(StoreError):
    """Bytes that were durable have changed."""

    def __init__(self, path: str, offset: int, what: str, remedy: str = "") -> None:
        super().__init__(
            f"{path} is damaged at byte {offset}: {what}",
            remedy
            or "Restore it from a backup, or start once with --salvage to continue without the "
            "lost data",
        )
        self.path = path
        self.offset = offset


class UnusableRecord(StoreError):
    """A record or snapshot has a valid checksum, but this version of Sluice cannot have written it.

    The store that read it adds file and position (`StoreDamaged`).
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            "Restore the store from a backup, or open it with the version of Sluice that wrote it",
        )


class StoreFailed(StoreError):
    """A write or a sync failed. The content of the disk is unknown until the store is reopened."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(
            f"the store has stopped: {what}",
            remedy
            or "Nothing more is acknowledged. Repair the disk or free space on it, and start again",
        )


class FramesLost(StoreFailed):
    """Redis continues at a frame before the last one that it confirmed."""

    def __init__(self, first: int, last: int, queues: dict[str, int]) -> None:
        self.first = first
        self.last = last
        self.queues = queues
        super().__init__(
            f"Redis has gone back to frame {first - 1}: it has lost the frames {first} to {last}, "
            f"which it had confirmed ({format_messages_by_queue(queues)}). Was a replica promoted "
            "that was behind, was Redis restarted without appendonly, or restored?",
            "Start this broker again: it continues with the frames that Redis has. Find out what "
            "was "
            "lost, then run `sluice losses confirm`. Set appendonly yes, and min-replicas-to-write "
            "if "
            "there are replicas",
        )


def format_messages_by_queue(queues: dict[str, int], max_queues: int = 20) -> str:
    """Return the number of lost messages by queue, as text."""
    if not queues:
        return "no message of a queue is known to be in them"
    named = [f"{name}: {count}" for name, count in sorted(queues.items())[:max_queues]]
    more = len(queues) - len(named)
    return "messages by queue: " + ", ".join(named) + (f" and {more} more queues" if more else "")


class UnknownLoss(SluiceError):
    def __init__(self, cell: int) -> None:
        super().__init__(
            f"the store of cell {cell} has no loss to confirm",
            "List the losses to confirm: `sluice losses list`",
        )


class StoreNotOpened(StoreError):
    """The system denies access to the directory, or an operation in it."""

    def __init__(self, directory: str, error: OSError) -> None:
        name = f" ({error.filename})" if error.filename else ""
        super().__init__(
            f"the store in {directory} cannot be opened: {error.strerror or error}{name}",
            _REMEDIES.get(
                error.errno or 0,
                "Nothing was changed. Fix the problem that the system reports, and start again",
            ),
        )
        self.directory = directory


class StoreUnreadable(StoreFailed):
    """The disk cannot read stored data. It may be readable later, so nothing is given up."""

    def __init__(self, path: str, offset: int) -> None:
        super().__init__(
            f"{path} cannot be read at byte {offset}: the disk reports an error",
            "Nothing is lost yet. Repair the disk, or copy the directory to another one, and start "
            "again; "
            "`sluice serve --salvage` continues without the unreadable part",
        )
        self.path = path
        self.offset = offset


class BrokerBroken(SluiceError):
    """An unexpected error occurred in the middle of a turn.

    The state in memory may be inconsistent; the state in the store is not.
    """

    def __init__(self, error: BaseException) -> None:
        memory = isinstance(error, MemoryError)
        super().__init__(
            "the broker has stopped: " + ("it is out of memory" if memory else f"{error!r}"),
            "Nothing more is acknowledged, and everything acknowledged is stored: start again. "
            + (
                "Raise the limit on memory, or lower mqtt.max_queued_bytes, mqtt.max_connections "
                "or "
                "queues.cache_bytes"
                if memory
                else "Its log has the stack trace: please report it"
            ),
        )


class QueueError(SluiceError):
    """An operation on a queue was refused."""


class InvalidQueueName(QueueError):
    def __init__(self, name: str, error: str) -> None:
        super().__init__(
            f"{name!r} is not a valid queue name: {error}", "Choose a name such as tasks/image"
        )


class UnknownQueue(QueueError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no queue {name!r}", "Publish or subscribe to it once, or create it"
        )


class QueueNotCreated(UnknownQueue):
    """Settings or access rules do not let a publish or a subscription create this queue."""

    def __init__(self, name: str, reason: str) -> None:
        QueueError.__init__(
            self,
            f"there is no queue {name!r}, and {reason}",
            f"Check the spelling, or create it: `sluice queue create {name}`",
        )


class UnknownOwner(UnknownQueue):
    def __init__(self, client: str) -> None:
        QueueError.__init__(
            self,
            f"there is no exclusive queue of {client!r}, or its retention has ended",
            "Publish to $ECQ/w/<client>/<key>, and check the spelling of the client id",
        )


class UnknownClient(UnknownQueue):
    def __init__(self, client: str) -> None:
        QueueError.__init__(
            self,
            f"there is no client {client!r}, and no session of it",
            "List the clients: `sluice clients list`",
        )


class ClientNotConnected(QueueError):
    def __init__(self, client: str) -> None:
        super().__init__(
            f"client {client!r} is not connected; only its session exists",
            "To delete the session with its subscriptions and pending messages, ask for"
            " end_session (`sluice clients kick --end-session`)",
        )


class StoreUnavailable(QueueError):
    """The store accepts no writes for now, and is expected to recover."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the store accepts no messages at the moment: {reason}", "Publish it again later"
        )


class NoRoom(StoreUnavailable):
    """The disk is nearly full. Stored messages are safe; more writes would stop the broker."""

    def __init__(self, reason: str) -> None:
        QueueError.__init__(
            self,
            f"the store accepts no more messages: {reason}",
            "Free space on that disk, or consume messages from queues; then publish it again",
        )


class MemoryFull(NoRoom):
    """The process has reached its memory limit. Deliveries and settlements continue."""

    def __init__(self, reason: str) -> None:
        QueueError.__init__(
            self,
            f"the broker accepts no more messages: {reason}",
            "Consume messages from queues, or raise limits.memory; then publish it again",
        )


def make_store_refusal(reason: str, no_room: bool, no_memory: bool) -> StoreUnavailable:
    """Return the error for a message that cannot be stored, by the scarce resource."""
    if no_memory:
        return MemoryFull(reason)
    return NoRoom(reason) if no_room else StoreUnavailable(reason)


class QueueExists(QueueError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"queue {name!r} exists already",
            "Change its configuration instead, or delete it first",
        )


class QueueFull(QueueError):
    def __init__(
        self, name: str, depth: int, compacted: bool = False, room: int = 0, batch: int = 0
    ) -> None:
        """Set `batch` to the size of a batch that exceeds the `room` left.

        A `compacted` queue keeps messages that its consumers have settled, so more consumers do not
        help.
        """
        noun = "key" if compacted else "message"
        remedy = "Delete unneeded keys with an empty payload" if compacted else "Add consumers"
        remedy += ", raise limits.max_queue_depth, or set limits.overflow"
        if batch:
            super().__init__(
                f"queue {name!r} has space for {room} {noun}{'' if room == 1 else 's'}, "
                f"and the batch has {batch}",
                f"Send smaller batches. {remedy}",
            )
        else:
            super().__init__(
                f"queue {name!r} is full at {depth} {noun}{'' if depth == 1 else 's'}", remedy
            )


class PartitionFull(QueueFull):
    """The store limits the length of a partition, regardless of the depth of its queue."""

    def __init__(self, name: str, number: int, length: int, room: int = 0, batch: int = 0) -> None:
        """Set `batch` to the size of a batch that exceeds the `room` left."""
        remedy = "Add consumers, raise redis.max_length, or set limits.overflow"
        if batch:
            QueueError.__init__(
                self,
                f"partition {number} of queue {name!r} has space for {room} "
                f"message{'' if room == 1 else 's'}, because its stream may hold {length}, "
                f"and the batch has {batch}",
                f"Send smaller batches. {remedy}",
            )
            return
        QueueError.__init__(
            self,
            f"partition {number} of queue {name!r} is full: its stream may hold {length} messages, "
            "and the first of them is not settled",
            remedy,
        )


class TooManyPartitions(QueueFull):
    def __init__(self, name: str, wanted: int, count: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"queue {name!r} would add {wanted} partitions to the {count} of all queues, and the "
            f"limit is {limit}",
            "Use fewer partitions, delete queues that are not needed, or raise "
            "queues.max_partitions",
        )


class TooManyGroups(QueueFull):
    def __init__(self, group: str, wanted: int, count: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"group {group!r} would follow {wanted} partitions, all groups together follow "
            f"{count}, "
            f"and the limit is {limit}",
            "Delete groups that are not needed, use fewer partitions, or raise "
            "queues.max_partitions",
        )


class TooManyFollowed(QueueFull):
    def __init__(self, name: str, groups: int, wanted: int, count: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"the {groups} groups of queue {name!r} would follow {wanted} more partitions, all "
            f"groups together follow {count}, and the limit is {limit}",
            "Use fewer partitions, delete groups that are not needed, or raise "
            "queues.max_partitions",
        )


class TooManyKeys(QueueFull):
    def __init__(self, client: str, keys: int) -> None:
        QueueError.__init__(
            self,
            f"$ECQ/{client} has {keys} {'key' if keys == 1 else 'keys'}, and may have no more",
            "Delete unneeded keys with an empty payload, or raise ecq.max_keys",
        )


class TooManyOwners(QueueFull):
    def __init__(self, owners: int) -> None:
        QueueError.__init__(
            self,
            f"{owners} clients have an exclusive queue, and there is no space for more",
            "Lower ecq.retention, so that empty exclusive queues are deleted sooner",
        )


class MessageTooLarge(QueueError):
    def __init__(self, name: str, size: int, limit: int) -> None:
        super().__init__(
            f"a message of {size} bytes is larger than the {limit} that queue {name!r} takes",
            "Send less, or raise limits.max_message_size",
        )


class ValueTooLarge(MessageTooLarge):
    def __init__(self, client: str, size: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"a value of {size} bytes is larger than the {limit} that $ECQ/{client} takes",
            "Send less, or raise ecq.max_message_size",
        )


class InvalidPayload(QueueError):
    def __init__(self, name: str, error: str, remedy: str = "Fix the payload") -> None:
        super().__init__(f"the payload does not fit the schema of queue {name!r}: {error}", remedy)


class InvalidQueueConfig(QueueError):
    """An unknown key, or a value out of its range."""


class ThenNotAllowed(QueueError):
    def __init__(self, topic: str) -> None:
        super().__init__(
            f"then publishes to {topic!r}, which the access rules do not allow this client",
            "Nothing was settled or published. Grant queue-publish, or leave the message out",
        )


class ThenElsewhere(QueueError):
    def __init__(self, topic: str) -> None:
        super().__init__(
            f"then publishes to {topic!r}, whose queue is in another cell than the delivery",
            "Nothing was settled or published. Publish it with a message-id first, then ack",
        )


class UnusableStrategy(InvalidQueueConfig):
    """The partition strategy of a queue is not installed, or cannot be loaded."""


class MissingKey(InvalidQueueConfig):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"queue {name!r} is compacted, and a message without a key cannot replace another",
            "Give it a key: user property partition-key, or the field key of the API",
        )


class InvalidSchedule(InvalidQueueConfig):
    """A schedule that cannot run: its times, its message or its queue."""


class ScheduleExists(QueueExists):
    def __init__(self, name: str) -> None:
        QueueError.__init__(
            self, f"schedule {name!r} exists already", "Change it, or remove it first"
        )


class TooManySchedules(QueueError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"there are {limit} schedules, as many as allowed",
            "Remove unused ones, or raise queues.max_schedules",
        )


class UnknownSchedule(QueueError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no schedule {name!r}", "See `sluice schedule list`")


class UnknownDelivery(QueueError):
    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"no delivery {message_id!r} is unsettled in this group",
            "It was settled before, or the id or the group is wrong",
        )


class ResponsesFull(QueueError):
    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} responses are waiting already, and no client has subscribed to this one",
            "Subscribe to a response topic before the request goes out, and answer requests once",
        )


class UnknownGroup(QueueError):
    def __init__(self, queue: str, group: str) -> None:
        super().__init__(
            f"queue {queue!r} has no group {group!r}",
            "Use an existing group (see `sluice group list`), or subscribe with this one first; a "
            "settlement names its group in user property consumer-group",
        )


class StaleDelivery(QueueError):
    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"delivery {message_id!r} is no longer leased to this client",
            "If its deadline had passed: work faster, extend it in time, or raise "
            "performance.delivery_timeout",
        )


class WrongToken(StaleDelivery):
    """A client settles with a token that does not belong to this delivery."""

    def __init__(self, message_id: str) -> None:
        QueueError.__init__(
            self,
            f"the delivery-token does not belong to delivery {message_id!r}",
            "Send the delivery-token of the delivery unchanged; a token from before a restart of "
            "the "
            "broker or a move of the queue is valid for the client id that received it",
        )


class TokenNeeded(StaleDelivery):
    """A client settles, without its token, a delivery from before a restart."""

    def __init__(self, message_id: str) -> None:
        QueueError.__init__(
            self,
            f"the client that received delivery {message_id!r} is unknown since the broker was "
            "restarted or the queue moved",
            "Send its delivery-token, or settle the next delivery: the message is redelivered",
        )


class TooManyIds(QueueError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the publish names more than {limit} messages, and none of them was processed",
            "Send several publishes",
        )


class NotHolder(QueueError):
    """A client settles, without its token, a delivery that went to another client."""

    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"delivery {message_id!r} went to another client",
            "Settle it as that client, send its delivery-token, or get a rule queue-admin for the "
            "queue",
        )


class GroupExists(QueueExists):
    """The group exists, like a queue that exists."""

    def __init__(self, queue: str, group: str) -> None:
        QueueError.__init__(
            self,
            f"queue {queue!r} has a group {group!r} already",
            "Move it with seek instead, or delete it first",
        )


class InUse(QueueExists):
    """The resource is in use and cannot be deleted."""

    def __init__(self, what: str, remedy: str) -> None:
        QueueError.__init__(self, what, remedy)


class UnknownMessage(QueueError):
    def __init__(self, queue: str, message_id: str) -> None:
        super().__init__(
            f"queue {queue!r} has no message {message_id!r}"
            if queue
            else f"no queue has a message {message_id!r}",
            "Look for its id with peek, or among the dead letters; settled messages are not stored",
        )
        self.queue = queue
        self.message_id = message_id


class AlreadyDelivered(QueueError):
    """A command comes too late for a message: a consumer is working on it."""

    def __init__(self, message_id: str, group: str, client: str) -> None:
        holder = f"consumer {client} of group {group}" if client else f"group {group}"
        super().__init__(
            f"too late: message {message_id!r} is in delivery to {holder}",
            "Let that consumer settle it. If the delivery fails, the command works until the next "
            "attempt",
        )


class TooManyMessages(QueueError):
    """A message is named by the id of its publisher, and too many messages are stored."""

    def __init__(self, queue: str, message_id: str) -> None:
        super().__init__(
            f"message {message_id!r} is not among the oldest messages of queue {queue!r}, and the "
            "queue has too many to search all of them",
            "Name the message by the id that the broker generated: peek shows it",
        )


class OutOfRange(QueueError):
    """Sequences that are no longer stored or not published yet."""

    def __init__(self, what: str, remedy: str, earliest: int = -1, latest: int = -1) -> None:
        super().__init__(what, remedy)
        self.earliest = earliest  # first stored sequence; -1 if it does not matter
        self.latest = latest


class QueueMadeAgain(QueueError):
    """A request has sequences of a deleted queue whose name another queue has now."""

    def __init__(self, queue: str, incarnation: str, now: str) -> None:
        super().__init__(
            f"queue {queue!r} was deleted and made again: {incarnation!r} is requested, and the "
            f"queue is {now!r}",
            "Sequences of the old queue mean nothing in the new one: read its offsets, and start "
            "again",
        )


class UnknownPartition(QueueError):
    def __init__(self, queue: str, number: int, count: int) -> None:
        super().__init__(
            f"queue {queue!r} has no partition {number}", f"Use a number from 0 to {count - 1}"
        )


class InvalidBatch(QueueError):
    """Rows that are not valid messages."""


class BatchTooLarge(QueueError):
    def __init__(
        self, app: str, batch: int, size: int, limit: int, is_unpacked: bool = False
    ) -> None:
        size_kind = " when it is unpacked" if is_unpacked else ""
        super().__init__(
            f"batch {batch} of {app!r} has {size} bytes or more{size_kind}, and {limit} are "
            "accepted at once",
            "Send smaller batches (in Spark: maxOffsetsPerTrigger or maxBytesPerTrigger), "
            "or raise bulk.max_batch_bytes",
        )


class TooManyRows(BatchTooLarge):
    def __init__(self, app: str, batch: int, rows: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"batch {batch} of {app!r} has {rows} rows or more, and {limit} are accepted at once",
            "Send smaller batches (in Spark: maxOffsetsPerTrigger), or raise bulk.max_batch_rows",
        )


class StaleBatch(QueueError):
    def __init__(self, app: str, batch: int, what: str) -> None:
        super().__init__(
            f"batch {batch} of {app!r} cannot be committed: {what}",
            "Stage its rows again and commit those; stages end with a restart, an abort, or after "
            "bulk.stage_ttl",
        )


class StagesFull(SluiceError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"batches that wait for their commit have {limit} bytes already",
            "Commit or abort some, wait, or raise bulk.max_stage_bytes",
        )


class StageUnwritable(StagesFull):
    """The disk has no space for a staged batch.

    The log may continue: it reserves space of its own.
    """

    def __init__(self, error: OSError) -> None:
        SluiceError.__init__(
            self,
            f"a batch cannot be staged: {error.strerror or error}",
            "Free space on the disk of the server, and send it again",
        )


class NoArrow(SluiceError):
    def __init__(self) -> None:
        super().__init__(
            "this server has no pyarrow, which bulk reading and writing needs",
            "pip install 'sluice[spark]'",
        )


class WorkerLost(SluiceError):
    """The process that reads for bulk readers ended during a read."""

    def __init__(self) -> None:
        super().__init__("the process that reads the log has ended", "Retry: another one starts")


class TooManyReaders(SluiceError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} ranges are being read already", "Retry in a moment, with fewer ranges at once"
        )


class UnreadableMessage(StoreError):
    def __init__(self, queue: str, partition: int, seq: int) -> None:
        super().__init__(
            f"message {seq} in partition {partition} of queue {queue!r} cannot be read from the "
            "store",
            "Its bytes are damaged: see the log of the server. Read the range around it",
        )


class AccessError(SluiceError):
    """Access was denied."""


class NotAuthenticated(AccessError):
    """The request has no credentials, or they are not valid."""

    def __init__(self, what: str = "the request has no credentials", remedy: str = "") -> None:
        super().__init__(
            what,
            remedy or "Send a token (Authorization: Bearer ...), or a user and its password",
        )


class NotAllowed(AccessError):
    """The user is known and has no permission."""

    def __init__(self, user: str, action: str, remedy: str = "") -> None:
        super().__init__(
            f"{user} may not {action}",
            remedy or "Ask an administrator for the required role or rule",
        )
        self.user = user
        self.action = action
