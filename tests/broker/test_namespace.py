"""The table of topic namespaces: which handler serves a topic or a filter."""

from __future__ import annotations

import pytest

from sluice.broker.namespace import NamespaceHandler, Namespaces

PLAIN, QUEUES, RESPONSES, RESERVED = (NamespaceHandler() for _ in range(4))


@pytest.fixture
def namespaces() -> Namespaces:
    table = Namespaces()
    table.serve_plain(PLAIN)
    table.register(b"$queue/responses/", RESPONSES)
    table.register(b"$queue/", QUEUES)
    table.register(b"$SYS/", RESERVED)
    table.register_topic(b"$SYS", RESERVED)
    return table


@pytest.mark.parametrize(
    ("topic", "handler"),
    [
        (b"$queue/jobs", QUEUES),
        (b"$queue/", QUEUES),
        (b"$queue/responses", QUEUES),
        (b"$queue/responses/a", RESPONSES),
        (b"$queue/+/responses", QUEUES),
        (b"$SYS/broker/uptime", RESERVED),
        (b"$SYS", RESERVED),
    ],
)
def test_topic_is_served_by_its_longest_registered_prefix(
    namespaces: Namespaces, topic: bytes, handler: NamespaceHandler
) -> None:
    assert namespaces.find(topic) is handler


@pytest.mark.parametrize(
    "topic", [b"a", b"", b"$", b"$queue", b"$queues/jobs", b"$share/g/$queue/a", b"$SYSTEM/x", b"#"]
)
def test_topic_outside_of_all_namespaces_is_plain(namespaces: Namespaces, topic: bytes) -> None:
    assert namespaces.find(topic) is PLAIN
