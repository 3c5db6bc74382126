"""What queues and groups may be called."""

from __future__ import annotations

import pytest

from sluice.queues.names import fault_of_group, fault_of_name


@pytest.mark.parametrize("name", ["tasks", "tasks/image", "dlq/tasks", "ärzte/β", "a b", "x" * 1024])
def test_a_queue_may_be_called_so(name: str) -> None:
    assert fault_of_name(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "a//b",
        "a/",
        "+",
        "a/#",
        "$x",
        "dlq",
        "responses",
        "x" * 1025,
        "a\0b",
        "a\nb",
        "a\x7f",
        "\x85",
        "\ud800",
    ],
)
def test_a_queue_may_not_be_called_so(name: str) -> None:
    assert fault_of_name(name)


def test_a_group_has_no_name_that_a_packet_cannot_carry() -> None:
    assert fault_of_group("workers-1") == ""
    assert all(fault_of_group(name) for name in ("", "a/b", "x" * 257, "a\0", "a\x1b[2J", "\udfff"))
