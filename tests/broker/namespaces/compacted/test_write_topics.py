"""The end of the client id in the topic of a write."""

from __future__ import annotations

import random

from sluice.broker.namespaces.compacted.handler import WRITE_PREFIX, find_client_end


def plain_end_of_client(topic: bytes) -> int:
    """The definition: a client id, a slash, and a key."""
    if not topic.startswith(WRITE_PREFIX):
        return -1
    cut = topic.find(b"/", len(WRITE_PREFIX))
    return cut if len(WRITE_PREFIX) < cut < len(topic) - 1 else -1


def test_client_id_in_a_write_topic_ends_at_the_first_slash() -> None:
    chance = random.Random(3)
    # Includes bytes that differ from a slash in one bit, or by one.
    alphabet = b"/.0a\x00\x01\x2e\x30\x7f\x80\xaf\xff"
    for _ in range(20_000):
        rest = bytes(chance.choice(alphabet) for _ in range(chance.randrange(24)))
        topic = WRITE_PREFIX + rest if chance.random() < 0.95 else rest
        assert find_client_end(topic) == plain_end_of_client(topic), topic


def test_long_topic_without_a_slash_has_no_client_id() -> None:
    for size in range(40):
        assert find_client_end(WRITE_PREFIX + b"x" * size) == -1
        assert find_client_end(WRITE_PREFIX + b"x" * size + b"/") == -1
        if size:
            assert find_client_end(WRITE_PREFIX + b"x" * size + b"/k") == len(WRITE_PREFIX) + size
