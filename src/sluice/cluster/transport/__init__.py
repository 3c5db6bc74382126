"""Links between nodes, and the streams that they carry."""

from sluice.cluster.transport.link_authentication import LinkKey
from sluice.cluster.transport.link_sockets import LinkOptions, LinkTls
from sluice.cluster.transport.peer_links import PeerLinks
from sluice.cluster.transport.streams import NoOwner, StreamLost, StreamProtocol, StreamTransport

__all__ = [
    "LinkKey",
    "LinkOptions",
    "LinkTls",
    "NoOwner",
    "PeerLinks",
    "StreamLost",
    "StreamProtocol",
    "StreamTransport",
]
