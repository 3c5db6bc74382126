"""What publishers, consumers and requesters need of the client that creates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Unpack

from sluice.client.message import Message, ReplyOptions
from sluice.client.net import Confirm, TopicDispatcher, UnseenFailures
from sluice.client.options import Options, UserProperties


class QueueClient(Protocol):
    """The client; `Client` describes its methods."""

    options: Options
    dispatcher: TopicDispatcher
    unseen_failures: UnseenFailures

    @property
    def client_id(self) -> str: ...
    @property
    def is_connected(self) -> bool: ...
    @property
    def has_capacity(self) -> bool: ...
    @property
    def unconfirmed(self) -> int: ...
    @property
    def unconfirmed_bytes(self) -> int: ...

    async def wait_for_capacity(self) -> None: ...
    def submit(self, confirm: Confirm) -> None: ...
    def withdraw(self, confirm: Confirm) -> None: ...
    def acknowledge(self, message: Message) -> None: ...
    def attach_replier(self, message: Message) -> None: ...
    def forget_subscription(self, topic_filter: str) -> None: ...
    async def subscribe(
        self,
        topic_filter: str | Sequence[str],
        qos: int = 0,
        *,
        user: UserProperties | None = None,
    ) -> list[int]: ...
    async def unsubscribe(
        self, topic_filter: str | Sequence[str], *, check: bool = True
    ) -> list[int]: ...
    async def reply(
        self, message: Message, payload: object = b"", **options: Unpack[ReplyOptions]
    ) -> None: ...
