"""Subscriptions of plain topics: what to receive, how to process it, where rejections go.

`ConsumerFactory` also takes objects of other classes. It decides by protocol: an object with
`dead_letter_topic` (`SupportsDeadLetters`) or `invalid_message_topic` (`SupportsInvalidMessages`)
gets these topics; other attributes that are named like those of `Subscription` are read as well.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Protocol,
    cast,
    get_args,
    runtime_checkable,
)

from sluice.client.errors import Unsupported
from sluice.client.payload_codecs import decoder_for

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from sluice.client.topics.topic_consumer import ConsumerFactory

    T = TypeVar("T", default=bytes)
else:
    T = typing.TypeVar("T")

UNLIMITED: Final = -1  # as `requeue_count`


class TopicSubscription(Protocol):
    """What every subscription has. All other attributes of `Subscription` are optional."""

    @property
    def topic(self) -> str: ...


@runtime_checkable
class SupportsDeadLetters(Protocol):
    """A subscription whose rejected messages go to a dead-letter topic."""

    @property
    def dead_letter_topic(self) -> str | None: ...


@runtime_checkable
class SupportsInvalidMessages(Protocol):
    """A subscription whose unacceptable messages go to a topic of their own."""

    @property
    def invalid_message_topic(self) -> str | None: ...


@dataclass
class Subscription(Generic[T]):
    """A topic filter, the optional topics for rejected messages, and how `run` processes messages.

    `message_type` (or `Subscription[Order](...)`) is the type that handlers get, decoded like the
    payload of a worker's task, or by `decoder`. Its name is recorded on rejected messages; a text
    is recorded only. The other fields:

    name                       in log lines; the topic unless given
    buffer_size                messages that wait in the client, at most
    performers                 handlers that run at once
    timeout_seconds            how long a handler may take
    receive_timeout_seconds    how long `receive` waits
    requeue_count              how often a failed message is handled again; -1: without end
    requeue_delay_seconds      the wait before that
    unacceptable_limit         `run` ends with an error after so many; 0: without end
    """

    topic: str
    qos: int = 1
    dead_letter_topic: str | None = None
    invalid_message_topic: str | None = None
    message_type: type[T] | str | None = None
    name: str = ""
    buffer_size: int | None = None
    performers: int = 1
    timeout_seconds: float | None = None
    receive_timeout_seconds: float | None = None
    requeue_count: int = 0
    requeue_delay_seconds: float = 0.0
    unacceptable_limit: int = 0
    decoder: Callable[[bytes], T] | None = None

    def __post_init__(self) -> None:
        self.name = self.name or self.topic
        if self.performers < 1 or self.requeue_count < UNLIMITED or self.unacceptable_limit < 0:
            raise Unsupported(
                f"subscription {self.name!r} has performers {self.performers}, requeue_count "
                f"{self.requeue_count} and unacceptable_limit {self.unacceptable_limit}",
                "Use at least 1, -1 and 0",
            )
        if self.buffer_size is not None and self.buffer_size < self.performers:
            raise Unsupported(
                f"subscription {self.name!r} has buffer_size {self.buffer_size} for "
                f"{self.performers} performers",
                "Use a buffer_size that is at least as large as performers",
            )

    @property
    def factory_type(self) -> type[ConsumerFactory]:
        """Return the class that creates consumers of this subscription."""
        from sluice.client.topics.topic_consumer import ConsumerFactory

        return ConsumerFactory

    @property
    def message_type_name(self) -> str | None:
        """Return what `originalMessageType` of a rejected message says, or None."""
        kind = self.message_type if self.message_type is not None else self._type_argument()
        return kind if isinstance(kind, str) else getattr(kind, "__name__", None)

    def make_decoder(self) -> Callable[[bytes], T]:
        """Return the function from payloads to what handlers get: the bytes, unless typed."""
        if self.decoder is not None:
            return self.decoder
        kind = self.message_type
        if kind is None or isinstance(kind, str):
            kind = self._type_argument()
        return cast("Callable[[bytes], T]", decoder_for(bytes if kind is None else kind))

    def _type_argument(self) -> Any:
        """Return `Order` for `Subscription[Order](...)`."""
        alias = getattr(self, "__orig_class__", None)
        arguments = get_args(alias)
        return None if not arguments or isinstance(arguments[0], typing.TypeVar) else arguments[0]


def read_subscription(given: TopicSubscription) -> Subscription[Any]:
    """Return the subscription that an object of any class describes."""
    if isinstance(given, Subscription):
        return given
    names = [one.name for one in fields(Subscription)]
    values = {
        name: getattr(given, name)
        for name in names
        if name not in ("dead_letter_topic", "invalid_message_topic") and hasattr(given, name)
    }
    if isinstance(given, SupportsDeadLetters):
        values["dead_letter_topic"] = given.dead_letter_topic
    if isinstance(given, SupportsInvalidMessages):
        values["invalid_message_topic"] = given.invalid_message_topic
    return Subscription(**values)
