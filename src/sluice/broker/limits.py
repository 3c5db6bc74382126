"""Limits that the broker imposes on clients.

They are plain attributes and not a configuration model, because the message path reads them.
"""

from __future__ import annotations

from mypy_extensions import i64


class Limits:
    def __init__(self) -> None:
        self.max_packet_size: i64 = 2_097_152
        self.receive_maximum: i64 = 1024  # QoS 1 and 2 publishes a client may have unacknowledged
        self.max_inflight: i64 = 1024  # QoS 1 and 2 deliveries a client may have unacknowledged
        self.topic_alias_maximum: i64 = 64
        self.max_keep_alive: int = 0  # seconds; 0: the client decides
        self.connect_timeout: float = 10.0
        self.max_session_expiry: int = 0xFFFF_FFFF  # seconds; this value: never
        self.max_queued_messages: i64 = 10_000
        self.max_queued_bytes: i64 = 67_108_864
        self.max_subscriptions: int = 10_000
        # Per session: bytes of filters and of the levels of their tree.
        self.max_subscription_bytes: int = 67_108_864
        self.max_connections: int = 0  # 0: no limit
        # Refuse connections with a higher file descriptor; 0: no limit.
        self.max_descriptor: int = 0
        self.max_connections_per_address: int = 0
        self.max_connections_per_user: int = 0
        self.max_publish_rate: float = 0.0  # messages of one client per second; 0: no limit
        self.max_publish_byte_rate: float = 0.0
        self.max_retained: int = 1_000_000
        # Topics with their levels, properties and payloads.
        self.max_retained_bytes: int = 268_435_456
        self.max_topic_levels: int = 128
        self.write_buffer_high: int = 1_048_576
        self.sys_interval: float = 10.0
        self.refused_filters: list[bytes] = []
        self.wildcard_subscriptions: bool = True
        self.shared_subscriptions: bool = True
        self.retain_available: bool = True
        self.max_qos: i64 = 2


def topic_depth_error(max_levels: int) -> str:
    """Return the error text for a retained topic with more than `max_levels` levels."""
    return (
        f"a retained topic has at most {max_levels} levels here (mqtt.max_topic_levels); "
        "use fewer, or publish without the retain flag"
    )
