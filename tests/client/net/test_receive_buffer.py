"""The buffer of messages between the connection and the application."""

from __future__ import annotations

import asyncio

import pytest

from sluice.client.net.receive_buffer import ReceiveBuffer


async def test_waiting_for_a_message_can_be_cancelled_while_the_client_closes() -> None:
    inbox: ReceiveBuffer[object] = ReceiveBuffer(10, lambda message: None)
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    waiting.cancel()
    inbox.end(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
