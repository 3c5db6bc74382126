"""Where the name of the client ends in the topic of a write."""

from __future__ import annotations

import random

from sluice.broker.namespaces.compacted.handler import WRITE, end_of_client


def plain_end_of_client(topic: bytes) -> int:
    """The definition: something, a slash, and something more."""
    if not topic.startswith(WRITE):
        return -1
    cut = topic.find(b"/", len(WRITE))
    return cut if len(WRITE) < cut < len(topic) - 1 else -1


def test_the_name_of_the_client_ends_at_the_first_slash_wherever_it_stands() -> None:
    chance = random.Random(3)
    letters = (
        b"/.0a\x00\x01\x2e\x30\x7f\x80\xaf\xff"  # with those that differ from a slash in one bit, or by one
    )
    for _ in range(20_000):
        rest = bytes(chance.choice(letters) for _ in range(chance.randrange(24)))
        topic = WRITE + rest if chance.random() < 0.95 else rest
        assert end_of_client(topic) == plain_end_of_client(topic), topic


def test_a_long_name_without_a_slash_has_no_end() -> None:
    for size in range(40):
        assert end_of_client(WRITE + b"x" * size) == -1
        assert end_of_client(WRITE + b"x" * size + b"/") == -1
        if size:
            assert end_of_client(WRITE + b"x" * size + b"/k") == len(WRITE) + size
