"""The loop of the admin APIs is not woken for gRPC events of the links between nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
import uvloop

from sluice.admin.server import AdminEventLoop


def listeners_on(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Record what a loop polls once gRPC is used on it."""
    received: list[Any] = []
    add_reader = uvloop.Loop.add_reader

    def note(loop: Any, fd: Any, callback: Any, *arguments: Any) -> None:
        received.append(callback)
        add_reader(loop, fd, callback, *arguments)

    async def use_grpc() -> None:
        await grpc.aio.server().stop(None)

    with monkeypatch.context() as patch:
        patch.setattr(uvloop.Loop, "add_reader", note)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(use_grpc())
    return received


def test_admin_loop_does_not_poll_the_grpc_queue_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(listeners_on(uvloop.new_event_loop, monkeypatch)) == 1
    assert listeners_on(AdminEventLoop, monkeypatch) == []
