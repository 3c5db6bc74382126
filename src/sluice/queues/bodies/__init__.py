"""Bodies of messages: the cache, reads of bodies that it does not have, and compression."""

from sluice.queues.bodies.body_cache import BodyCache
from sluice.queues.bodies.body_reads import BodyReads, decode_message
from sluice.queues.bodies.codec import ZstdCodec

__all__ = [
    "BodyCache",
    "BodyReads",
    "ZstdCodec",
    "decode_message",
]
