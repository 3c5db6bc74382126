"""Every way in which Sluice says no.

An error carries what happened (its message) and what to do about it (`do`). It knows facts, not doors: the MQTT, HTTP
and gRPC doors each have one table that turns a kind of error into their own code. The exception is the family of
`ProtocolViolation`: it is about MQTT itself, so it carries the reason code that the specification gives the fault.
"""

from __future__ import annotations

import errno


class SluiceError(Exception):
    """The root of all refusals."""

    def __init__(self, resource: str, remedy: str = "") -> None:
        super().__init__(resource)
        self.what = resource
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}" if self.remedy else self.what


class ConfigError(SluiceError):
    """The configuration cannot be used as it is."""


class ProtocolViolation(SluiceError):
    """The peer broke a rule of MQTT; its connection ends with `reason`, and nothing else is touched."""

    reason: int = 0x82  # Protocol Error

    def __init__(self, resource: str, remedy: str = "", reason: int = 0) -> None:
        super().__init__(resource, remedy)
        if reason:
            self.reason = reason


class MalformedPacket(ProtocolViolation):
    """The bytes cannot be a packet."""

    reason = 0x81


class PacketTooLarge(ProtocolViolation):
    """Judged from the fixed header alone, before the bytes are held."""

    reason = 0x95

    def __init__(self, length: int, limit: int, first: bool = False) -> None:
        super().__init__(
            f"a packet of {length} bytes is larger than the {limit} allowed {'to begin with' if first else 'here'}",
            "Connect first: larger ones are for those who are known"
            if first
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
            f"protocol {name[:16]!r} level {level} is not spoken here",
            "Connect with MQTT 3.1.1 or MQTT 5.0",
        )
        self.level = level


class StoreError(SluiceError):
    """The place where messages are kept cannot be used as it is."""


class StoreLocked(StoreError):
    def __init__(self, directory: str, holder: str) -> None:
        super().__init__(
            f"the store in {directory} is open in another process"
            + (f", number {holder}" if holder else ""),
            "Stop that process, or give this one a directory of its own",
        )
        self.directory = directory


_REMEDY_PERMISSIONS = (
    "Let the user that runs the broker write there (`ls -ld` shows who may; `mount` whether it is read-only), "
    "or choose another directory: --data DIR"
)
_REMEDY_DIRECTORY = "Give a directory, or a place where one can be made: --data DIR"
_REMEDY_DISK_FULL = "Make room on that disk: a start needs a little itself. What was acknowledged is there and comes back"
_REMEDIES = {
    errno.EACCES: _REMEDY_PERMISSIONS,
    errno.EPERM: _REMEDY_PERMISSIONS,
    errno.EROFS: _REMEDY_PERMISSIONS,
    errno.ENOTDIR: _REMEDY_DIRECTORY,
    errno.EEXIST: _REMEDY_DIRECTORY,
    errno.ENOSPC: _REMEDY_DISK_FULL,
    errno.EDQUOT: _REMEDY_DISK_FULL,
    errno.EIO: "The disk reports errors: mend it, or copy the directory to a good one, and start again",
    errno.EMFILE: "Raise the limit of open files (ulimit -n), and start again",
}


class StoreUnknown(StoreError):
    """Written by a Sluice that kept its files in another way."""

    def __init__(self, directory: str, found: str, known: int) -> None:
        super().__init__(
            f"the store in {directory} has layout {found}, and this Sluice knows layout {known}",
            "Open it with the version of Sluice that wrote it",
        )
        self.directory = directory


class StoreDamaged(StoreError):
    """Bytes that had been written safely are no longer what they were."""

    def __init__(self, path: str, offset: int, resource: str, remedy: str = "") -> None:
        super().__init__(
            f"{path} is damaged at byte {offset}: {resource}",
            remedy
            or "Restore it from a backup, or start once with --salvage to go on without what is lost",
        )
        self.path = path
        self.offset = offset


class UnusableRecord(StoreError):
    """A record or a snapshot whose checksum is right, and whose contents no Sluice of this version
    has written. The
    store that read it adds the file and the position (`StoreDamaged`)."""

    def __init__(self, resource: str) -> None:
        super().__init__(
            resource,
            "Restore the store from a backup, or open it with the version of Sluice that wrote it",
        )


class StoreFailed(StoreError):
    """A write or a sync did not succeed. What the disk holds is unknown until the store is opened again."""

    def __init__(self, resource: str, remedy: str = "") -> None:
        super().__init__(
            f"the store has stopped: {resource}",
            remedy
            or "Nothing more is acknowledged. Make the disk well, or make room on it, and start again",
        )


class FramesLost(StoreFailed):
    """A store has gone back behind frames that it had confirmed."""

    def __init__(self, first: int, last: int, queues: dict[str, int]) -> None:
        self.first = first
        self.last = last
        self.queues = queues
        super().__init__(
            f"Redis has gone back to frame {first - 1}: it has lost the frames {first} to {last}, which "
            f"it had confirmed ({format_messages_by_queue(queues)}). Was a replica promoted that was behind, "
            "was Redis restarted without appendonly, or restored?",
            "Start this broker again: it continues with what is there. Find out what was lost, then run "
            "`sluice losses confirm`. Set appendonly yes, and min-replicas-to-write if there are "
            "replicas",
        )


def format_messages_by_queue(queues: dict[str, int], max_queues: int = 20) -> str:
    """Return how many messages of which queues are known to be lost, in words."""
    if not queues:
        return "no message of a queue is known to be in them"
    named = [f"{name}: {count}" for name, count in sorted(queues.items())[:max_queues]]
    more = len(queues) - len(named)
    return "messages by queue: " + ", ".join(named) + (f" and {more} more queues" if more else "")


class UnknownLoss(SluiceError):
    def __init__(self, cell: int) -> None:
        super().__init__(
            f"the store of cell {cell} has no loss to confirm",
            "List what is to be confirmed: `sluice losses list`",
        )


class StoreNotOpened(StoreError):
    """The system does not let us have the directory, or not all of what we need to do in it."""

    def __init__(self, directory: str, error: OSError) -> None:
        name = f" ({error.filename})" if error.filename else ""
        super().__init__(
            f"the store in {directory} cannot be opened: {error.strerror or error}{name}",
            _REMEDIES.get(
                error.errno or 0,
                "Nothing was changed. Mend what the system complains of, and start again",
            ),
        )
        self.directory = directory


class StoreUnreadable(StoreFailed):
    """The disk does not give back what was written. It may do so again: nothing is given up for that."""

    def __init__(self, path: str, offset: int) -> None:
        super().__init__(
            f"{path} cannot be read at byte {offset}: the disk reports an error",
            "Nothing is lost yet. Mend the disk, or copy the directory to a good one, and start again; "
            "`sluice serve --salvage` gives up what cannot be read",
        )
        self.path = path
        self.offset = offset


class BrokerBroken(SluiceError):
    """Something happened in the middle of a turn that no part of the broker expects. What it remembers may be half
    changed; what the store has is not."""

    def __init__(self, error: BaseException) -> None:
        memory = isinstance(error, MemoryError)
        super().__init__(
            "the broker has stopped: "
            + ("the system gives it no more memory" if memory else f"{error!r}"),
            "Nothing more is acknowledged, and what was acknowledged is kept: start again. "
            + (
                "Raise the limit on memory, or lower mqtt.max_queued_bytes, mqtt.max_connections or queues.cache_bytes"
                if memory
                else "Its log has the place where it happened: please report it"
            ),
        )


class QueueError(SluiceError):
    """Something about a queue that was refused."""


class InvalidQueueName(QueueError):
    def __init__(self, name: str, error: str) -> None:
        super().__init__(
            f"{name!r} cannot be a queue: {error}", "Choose a name such as tasks/image"
        )


class UnknownQueue(QueueError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"there is no queue {name!r}", "Publish or subscribe to it once, or create it"
        )


class UnknownOwner(UnknownQueue):
    def __init__(self, client: str) -> None:
        QueueError.__init__(
            self,
            f"nothing was ever written for {client!r}, or it is forgotten by now",
            "Publish to $ECQ/w/<client>/<key>, with the client id as its owner spells it",
        )


class StoreUnavailable(QueueError):
    """The store takes no writes for now, and is expected to do so again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"nothing can be kept at the moment: {reason}", "Publish it again later")


class NoRoom(StoreUnavailable):
    """The disk is nearly full. What is kept is safe; more would end the broker."""

    def __init__(self, reason: str) -> None:
        QueueError.__init__(
            self,
            f"nothing more is kept: {reason}",
            "Make room on that disk, or take what waits in queues; then publish it again",
        )


class MemoryFull(NoRoom):
    """The process uses as much memory as it may. Deliveries and settlements go on."""

    def __init__(self, reason: str) -> None:
        QueueError.__init__(
            self,
            f"nothing more is accepted: {reason}",
            "Let consumers take what waits in queues, or raise limits.memory; then publish it again",
        )


def make_store_refusal(reason: str, no_room: bool, no_memory: bool) -> StoreUnavailable:
    """The refusal of what would have to be stored, by what is wanting."""
    if no_memory:
        return MemoryFull(reason)
    return NoRoom(reason) if no_room else StoreUnavailable(reason)


class QueueExists(QueueError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"queue {name!r} is there already",
            "Change its configuration instead, or delete it first",
        )


class QueueFull(QueueError):
    def __init__(
        self, name: str, depth: int, compacted: bool = False, room: int = 0, batch: int = 0
    ) -> None:
        """A `compacted` queue keeps what its consumers have settled: more of them do not help. `batch`: so many came at
        once, and there is `room` for fewer."""
        resource = "key" if compacted else "message"
        cure = (
            "End keys that are not needed with an empty payload" if compacted else "Add consumers"
        )
        cure += ", raise limits.max_queue_depth, or set limits.overflow"
        if batch:
            super().__init__(
                f"queue {name!r} has room for {room} {resource}{'' if room == 1 else 's'}, and the batch brings {batch}",
                f"Send smaller batches. {cure}",
            )
        else:
            super().__init__(
                f"queue {name!r} is full at {depth} {resource}{'' if depth == 1 else 's'}", cure
            )


class PartitionFull(QueueFull):
    """Of a store that limits how long a partition may be, whatever the depth of its queue."""

    def __init__(self, name: str, number: int, length: int, room: int = 0, batch: int = 0) -> None:
        """`batch`: so many came at once, and there is `room` for fewer."""
        cure = "Add consumers, raise redis.max_length, or set limits.overflow"
        if batch:
            QueueError.__init__(
                self,
                f"partition {number} of queue {name!r} has room for {room} message{'' if room == 1 else 's'}, because "
                f"its stream may hold {length}, and the batch brings {batch}",
                f"Send smaller batches. {cure}",
            )
            return
        QueueError.__init__(
            self,
            f"partition {number} of queue {name!r} is full: its stream may hold {length} messages, and the first of "
            "them is not settled",
            cure,
        )


class TooManyPartitions(QueueFull):
    def __init__(self, name: str, wanted: int, count: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"queue {name!r} would add {wanted} partitions to the {count} of all queues, and there may be {limit}",
            "Use fewer partitions, delete queues that are not needed, or raise queues.max_partitions",
        )


class TooManyGroups(QueueFull):
    def __init__(self, group: str, wanted: int, count: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"group {group!r} would follow {wanted} partitions, all groups together follow {count}, and there may "
            f"be {limit}",
            "Delete groups that are not needed, use fewer partitions, or raise queues.max_partitions",
        )


class TooManyFollowed(QueueFull):
    def __init__(self, name: str, groups: int, wanted: int, count: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"the {groups} groups of queue {name!r} would follow {wanted} more partitions, all groups together "
            f"follow {count}, and there may be {limit}",
            "Use fewer partitions, delete groups that are not needed, or raise queues.max_partitions",
        )


class TooManyKeys(QueueFull):
    def __init__(self, client: str, keys: int) -> None:
        QueueError.__init__(
            self,
            f"$ECQ/{client} has {keys} {'key' if keys == 1 else 'keys'}, and may have no more",
            "End keys that are not needed with an empty payload, or raise ecq.max_keys",
        )


class TooManyOwners(QueueFull):
    def __init__(self, owners: int) -> None:
        QueueError.__init__(
            self,
            f"{owners} clients have an exclusive queue, and there is no room for more",
            "Lower ecq.retention, so that those are forgotten sooner for whom nothing is kept",
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
    def __init__(self, name: str, error: str) -> None:
        super().__init__(
            f"the payload does not fit the schema of queue {name!r}: {error}", "Mend the payload"
        )


class InvalidQueueConfig(QueueError):
    """A key that is unknown, or a value out of its range."""


class MissingKey(InvalidQueueConfig):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"queue {name!r} is compacted, and a message without a key cannot take the place of another",
            "Give it a key: user property partition-key, or key where the door has a field for it",
        )


class UnknownDelivery(QueueError):
    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"no delivery {message_id!r} waits to be settled in this group",
            "It was settled before, or the id or the group is another one",
        )


class ResponsesFull(QueueError):
    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count} responses wait already, and nobody has asked for this one",
            "Subscribe to a response topic before the request goes out, and answer requests once",
        )


class UnknownGroup(QueueError):
    def __init__(self, queue: str, group: str) -> None:
        super().__init__(
            f"queue {queue!r} has no group {group!r}",
            "Use one that it has (`sluice group list` names them), or subscribe with this one first; who settles "
            "names it by user property consumer-group",
        )


class StaleDelivery(QueueError):
    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"delivery {message_id!r} has passed to another consumer",
            "Its deadline had passed: work faster, extend it in time, or raise performance.delivery_timeout",
        )


class WrongToken(StaleDelivery):
    """A client settles with a token that it was not given for this delivery."""

    def __init__(self, message_id: str) -> None:
        QueueError.__init__(
            self,
            f"the delivery-token is not one that was given with delivery {message_id!r}",
            "Send the delivery-token of the delivery as it came; one from before a restart of the broker or a move of "
            "the queue counts for the client that received it, under the same client id",
        )


class TokenNeeded(StaleDelivery):
    """A client settles without its token what was delivered before a restart."""

    def __init__(self, message_id: str) -> None:
        QueueError.__init__(
            self,
            f"who received delivery {message_id!r} is not known since the broker was restarted or the queue moved",
            "Send its delivery-token along, or settle the next delivery: the message is delivered again",
        )


class TooManyIds(QueueError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the publish names more than {limit} messages, and none of them was looked at",
            "Send several publishes",
        )


class NotHolder(QueueError):
    """A client settles, without its token, a delivery that went to another client."""

    def __init__(self, message_id: str) -> None:
        super().__init__(
            f"delivery {message_id!r} went to another client",
            "Settle it as that client, send its delivery-token along, or get a rule queue-admin for the queue",
        )


class GroupExists(QueueExists):
    """Like a queue that is there already: what is asked for is taken."""

    def __init__(self, queue: str, group: str) -> None:
        QueueError.__init__(
            self,
            f"queue {queue!r} has a group {group!r} already",
            "Send it to another place with seek instead, or delete it first",
        )


class InUse(QueueExists):
    """Somebody works with it right now, so it cannot be taken away."""

    def __init__(self, resource: str, remedy: str) -> None:
        QueueError.__init__(self, resource, remedy)


class UnknownMessage(QueueError):
    def __init__(self, queue: str, message_id: str) -> None:
        super().__init__(
            f"queue {queue!r} knows no message {message_id!r}"
            if queue
            else f"no queue knows a message {message_id!r}",
            "Look for its id with peek, or among the dead letters; messages that were settled are not kept",
        )
        self.queue = queue
        self.message_id = message_id


class OutOfRange(QueueError):
    """Sequences that are not kept any more, or that nobody has published yet."""

    def __init__(self, resource: str, remedy: str, earliest: int = -1, latest: int = -1) -> None:
        super().__init__(resource, remedy)
        self.earliest = earliest  # of what is kept; -1 where that does not matter
        self.latest = latest


class QueueMadeAgain(QueueError):
    """Sequences of a queue that was deleted, told to the one that has its name now."""

    def __init__(self, queue: str, incarnation: str, now: str) -> None:
        super().__init__(
            f"queue {queue!r} was deleted and made again: {incarnation!r} is asked for, and there is {now!r}",
            "Sequences of the old queue mean nothing in the new one: ask for its offsets, and begin anew",
        )


class UnknownPartition(QueueError):
    def __init__(self, queue: str, number: int, count: int) -> None:
        super().__init__(
            f"queue {queue!r} has no partition {number}", f"Give one from 0 to {count - 1}"
        )


class InvalidBatch(QueueError):
    """Rows that cannot be messages."""


class BatchTooLarge(QueueError):
    def __init__(
        self, app: str, batch: int, size: int, limit: int, is_unpacked: bool = False
    ) -> None:
        unpacked = " when it is unpacked" if is_unpacked else ""
        super().__init__(
            f"batch {batch} of {app!r} has {size} bytes or more{unpacked}, and {limit} are taken at once",
            "Send smaller batches (in Spark: maxOffsetsPerTrigger or maxBytesPerTrigger), "
            "or raise bulk.max_batch_bytes",
        )


class TooManyRows(BatchTooLarge):
    def __init__(self, app: str, batch: int, rows: int, limit: int) -> None:
        QueueError.__init__(
            self,
            f"batch {batch} of {app!r} has {rows} rows or more, and {limit} are taken at once",
            "Send smaller batches (in Spark: maxOffsetsPerTrigger), or raise bulk.max_batch_rows",
        )


class StaleBatch(QueueError):
    def __init__(self, app: str, batch: int, resource: str) -> None:
        super().__init__(
            f"batch {batch} of {app!r} cannot be committed: {resource}",
            "Stage its rows again and commit those; stages end with a restart, an abort, or after bulk.stage_ttl",
        )


class StagesFull(SluiceError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"batches that wait for their commit have {limit} bytes already",
            "Commit or abort some, wait, or raise bulk.max_stage_bytes",
        )


class StageUnwritable(StagesFull):
    """The disk does not take what a batch brings. The log may go on: it has room of its own to lose."""

    def __init__(self, error: OSError) -> None:
        SluiceError.__init__(
            self,
            f"a batch cannot be staged: {error.strerror or error}",
            "Make room on the disk of the server, and send it again",
        )


class NoArrow(SluiceError):
    def __init__(self) -> None:
        super().__init__(
            "this server has no pyarrow, which bulk reading and writing needs",
            "pip install 'sluice[spark]'",
        )


class WorkerLost(SluiceError):
    """The process that reads for bulk readers has ended in the middle of it."""

    def __init__(self) -> None:
        super().__init__(
            "the process that reads the log has ended", "Ask again; another one is started"
        )


class TooManyReaders(SluiceError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} ranges are being read already", "Ask again in a moment, and for fewer at once"
        )


class UnreadableMessage(StoreError):
    def __init__(self, queue: str, partition: int, seq: int) -> None:
        super().__init__(
            f"message {seq} in partition {partition} of queue {queue!r} cannot be read from the store",
            "Its bytes are damaged: see the log of the server. Read the range around it",
        )


class AccessError(SluiceError):
    """Somebody wants what is not theirs."""


class NotAuthenticated(AccessError):
    """A door that asks who is there got no answer, or one that does not hold."""

    def __init__(self, resource: str = "nobody has said who is asking", remedy: str = "") -> None:
        super().__init__(
            resource,
            remedy or "Send a token (Authorization: Bearer ...), or a user and its password",
        )


class NotAllowed(AccessError):
    """Known, and not permitted."""

    def __init__(self, user: str, resource: str, remedy: str = "") -> None:
        super().__init__(
            f"{user} may not {resource}",
            remedy or "Ask an administrator for the role or the rule it takes",
        )
        self.user = user
        self.action = resource
