"""The client's side of MQTT, without an event loop."""

from sluice.client.protocol.client_protocol import (
    ClientProtocol,
    ConnectDenied,
    Connected,
    State,
    requests_for,
)
from sluice.client.protocol.keepalive import KeepAlive, KeepAliveAction
from sluice.client.protocol.pending import (
    PendingOperation,
    PendingPublish,
    PendingSubscription,
    PublishResult,
)
from sluice.client.protocol.publish_packet import (
    Payload,
    PublishProperties,
    make_publish,
    refuse_properties,
)
from sluice.client.protocol.server_info import ServerInfo
from sluice.client.protocol.write_buffer import ignore_wake

__all__ = [
    "ClientProtocol",
    "ConnectDenied",
    "Connected",
    "KeepAlive",
    "KeepAliveAction",
    "Payload",
    "PendingOperation",
    "PendingPublish",
    "PendingSubscription",
    "PublishProperties",
    "PublishResult",
    "ServerInfo",
    "State",
    "ignore_wake",
    "make_publish",
    "refuse_properties",
    "requests_for",
]
