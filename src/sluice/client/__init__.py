"""The client library of Sluice: MQTT 3.1.1 and 5.0 for asyncio, on the same wire code as the broker."""

from sluice.client.client import Client
from sluice.client.confirm import Confirm
from sluice.client.errors import (
    ClientClosed,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    ConnectRefused,
    PublishRefused,
    Refusal,
    ServerDisconnected,
    SubscribeRefused,
    TooManyUnconfirmed,
    UnsubscribeRefused,
    Unsupported,
)
from sluice.client.exchange import PublishResult
from sluice.client.message import Message
from sluice.client.options import Backoff, Will
from sluice.client.protocol import Connected
from sluice.client.server import ServerInfo
from sluice.wire.properties import Properties

__all__ = [
    "Backoff",
    "Client",
    "ClientClosed",
    "ClientError",
    "Confirm",
    "ConnectFailed",
    "ConnectRefused",
    "Connected",
    "ConnectionLost",
    "Message",
    "Properties",
    "PublishRefused",
    "PublishResult",
    "Refusal",
    "ServerDisconnected",
    "ServerInfo",
    "SubscribeRefused",
    "TooManyUnconfirmed",
    "UnsubscribeRefused",
    "Unsupported",
    "Will",
]
