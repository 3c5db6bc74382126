"""The queues as objects in memory: queues, partitions, groups, cursors and leases.

They decide nothing by themselves: `flow` does. They refer to each other in circles, as a message is
in a partition, and its lease in a cursor of a group.
"""

from sluice.queues.model import history
from sluice.queues.model.admission import BREAKER_NAMES, CLOSED, NOT_PAUSED, Admission, Pause
from sluice.queues.model.containers.held_key import NO_HELD_KEYS, HeldKey
from sluice.queues.model.containers.last_values import MAX_CACHED_KEY_LENGTH, LastValues, hash_key
from sluice.queues.model.containers.lost_ranges import LostRanges, read_lost_ranges
from sluice.queues.model.containers.message_columns import BLOCK_SIZE, NO_ADDRESS, AddressSnapshot
from sluice.queues.model.containers.recent_acks import (
    MAX_ROWS,
    Acknowledgement,
    RecentAcks,
    RowBudget,
)
from sluice.queues.model.cursor import SEQUENCE_BITS, SEQUENCE_MASK, Cursor
from sluice.queues.model.delivery_lease import (
    AWAIT_RETRY,
    BACKOFF,
    DEAD_LETTERING,
    DUE,
    ENDED,
    FAIL,
    FORGET,
    GIVE_UP,
    LEASED,
    READ_BODY,
    READY,
    REJECT,
    RELEASE,
    REVOKE,
    SETTLE,
    Lease,
)
from sluice.queues.model.effects import (
    FOR_DEAD_LETTER,
    FOR_DELIVERY,
    FOR_EXPIRY,
    FOR_PREFETCH,
    FOR_SEARCH,
    NO_EFFECTS,
    Alert,
    BodyRead,
    Effects,
    IdSearch,
)
from sluice.queues.model.group import Consumer, Group
from sluice.queues.model.history import MAX_EVENTS, HistoryEvent
from sluice.queues.model.ledger import (
    Ledger,
    build_ledger,
    count_unsettled,
    verify,
    verify_group,
    verify_queue,
)
from sluice.queues.model.partition import NO_DELAYED, Partition
from sluice.queues.model.queue import PartitionGate, Queue
from sluice.queues.model.queue_rules import (
    ANY_ORDER,
    DEAD_LETTER,
    DROP_OLDEST,
    PER_KEY,
    REJECT_NEW,
    STRICT,
    QueueRules,
)
from sluice.queues.model.state import EngineState

__all__ = [
    "ANY_ORDER",
    "AWAIT_RETRY",
    "BACKOFF",
    "BLOCK_SIZE",
    "BREAKER_NAMES",
    "CLOSED",
    "DEAD_LETTER",
    "DEAD_LETTERING",
    "DROP_OLDEST",
    "DUE",
    "ENDED",
    "FAIL",
    "FORGET",
    "FOR_DEAD_LETTER",
    "FOR_DELIVERY",
    "FOR_EXPIRY",
    "FOR_PREFETCH",
    "FOR_SEARCH",
    "GIVE_UP",
    "LEASED",
    "MAX_CACHED_KEY_LENGTH",
    "MAX_EVENTS",
    "MAX_ROWS",
    "NOT_PAUSED",
    "NO_ADDRESS",
    "NO_DELAYED",
    "NO_EFFECTS",
    "NO_HELD_KEYS",
    "PER_KEY",
    "READY",
    "READ_BODY",
    "REJECT",
    "REJECT_NEW",
    "RELEASE",
    "REVOKE",
    "SEQUENCE_BITS",
    "SEQUENCE_MASK",
    "SETTLE",
    "STRICT",
    "Acknowledgement",
    "AddressSnapshot",
    "Admission",
    "Alert",
    "BodyRead",
    "Consumer",
    "Cursor",
    "Effects",
    "EngineState",
    "Group",
    "HeldKey",
    "HistoryEvent",
    "IdSearch",
    "LastValues",
    "Lease",
    "Ledger",
    "LostRanges",
    "Partition",
    "PartitionGate",
    "Pause",
    "Queue",
    "QueueRules",
    "RecentAcks",
    "RowBudget",
    "build_ledger",
    "count_unsettled",
    "hash_key",
    "history",
    "read_lost_ranges",
    "verify",
    "verify_group",
    "verify_queue",
]
