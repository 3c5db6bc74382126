"""Links between nodes, and the streams that they carry."""

from sluice.cluster.transport.link_authentication import LinkKey
from sluice.cluster.transport.link_sockets import LinkOptions, LinkTls
from sluice.cluster.transport.peer_links import PeerLinks
from sluice.cluster.transport.stream_acceptor import (
    PROXY_GREETING,
    accept_stream,
    is_known_greeting,
    make_greeting,
)
from sluice.cluster.transport.streams import NoOwner, StreamLost, StreamProtocol, StreamTransport

__all__ = [
    "PROXY_GREETING",
    "LinkKey",
    "LinkOptions",
    "LinkTls",
    "NoOwner",
    "PeerLinks",
    "StreamLost",
    "StreamProtocol",
    "StreamTransport",
    "accept_stream",
    "is_known_greeting",
    "make_greeting",
]
