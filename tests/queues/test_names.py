"""Valid and invalid names of queues and groups."""

from __future__ import annotations

import pytest

from sluice.queues.names import group_name_error, queue_name_error


@pytest.mark.parametrize(
    "name", ["tasks", "tasks/image", "dlq/tasks", "ärzte/β", "a b", "x" * 1024]
)
def test_valid_queue_names(name: str) -> None:
    assert queue_name_error(name) == ""


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
def test_invalid_queue_names(name: str) -> None:
    assert queue_name_error(name)


def test_group_name_that_no_packet_can_carry_is_refused() -> None:
    assert group_name_error("workers-1") == ""
    assert all(
        group_name_error(name) for name in ("", "a/b", "x" * 257, "a\0", "a\x1b[2J", "\udfff")
    )
