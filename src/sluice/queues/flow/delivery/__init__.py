"""Deliveries from lease to settlement: dispatch, tokens, acks, nacks, retries, pauses."""

from sluice.queues.flow.delivery.delivery_control import (
    DeliveryControl,
    load_admission,
    read_pause,
    write_admission,
    write_pause,
)
from sluice.queues.flow.delivery.delivery_history import (
    RecentHistory,
    read_events,
    store_released,
    take_released,
    write_events,
)
from sluice.queues.flow.delivery.delivery_tokens import (
    RUN_BYTES,
    SECRET_BYTES,
    DeliveryToken,
    DeliveryTokens,
)
from sluice.queues.flow.delivery.dispatch import Dispatch
from sluice.queues.flow.delivery.key_holds import KeyHolds, load_held_keys, write_held_keys
from sluice.queues.flow.delivery.lease_lookup import LeaseLookup
from sluice.queues.flow.delivery.settlement import Settlement, write_retry

__all__ = [
    "RUN_BYTES",
    "SECRET_BYTES",
    "DeliveryControl",
    "DeliveryToken",
    "DeliveryTokens",
    "Dispatch",
    "KeyHolds",
    "LeaseLookup",
    "RecentHistory",
    "Settlement",
    "load_admission",
    "load_held_keys",
    "read_events",
    "read_pause",
    "store_released",
    "take_released",
    "write_admission",
    "write_events",
    "write_held_keys",
    "write_pause",
    "write_retry",
]
