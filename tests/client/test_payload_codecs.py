"""Encoding of payloads, and the dispatch of messages by topic."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pydantic
import pytest

from sluice.client.errors import ClientError
from sluice.client.message import Message
from sluice.client.net.dispatcher import MAX_CACHED_TOPICS, TopicDispatcher
from sluice.client.payload_codecs import duration_text, encode_payload


class Image(pydantic.BaseModel):
    name: str


class Sound(msgspec.Struct):
    name: str


@dataclass
class Point:
    x: int
    y: int


@pytest.mark.parametrize(
    ("value", "payload", "content_type"),
    [
        (b"\xff", b"\xff", None),
        (bytearray(b"ab"), b"ab", None),
        (memoryview(b"ab"), b"ab", None),
        ("café", b"caf\xc3\xa9", None),
        ({"a": [1, None]}, b'{"a":[1,null]}', "application/json"),
        (7, b"7", "application/json"),
        (Image(name="cat"), b'{"name":"cat"}', "application/json"),
        (Sound("meow"), b'{"name":"meow"}', "application/json"),
        (Point(1, 2), b'{"x":1,"y":2}', "application/json"),
    ],
    ids=[
        *("bytes", "bytearray", "memoryview", "text", "json", "number", "pydantic", "msgspec"),
        "dataclass",
    ],
)
def test_value_is_encoded_as_payload(
    value: object, payload: bytes, content_type: str | None
) -> None:
    assert encode_payload(value) == (payload, content_type)


def test_value_that_json_cannot_encode_is_an_error() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode_payload({"a": object()})


@pytest.mark.parametrize(("given", "text"), [(0, "0ms"), (1.5, "1500ms"), ("2h", "2h")])
def test_durations_are_seconds_or_text(given: float | str, text: str) -> None:
    assert duration_text("delay", given) == text


class RecordingReceiver:
    def receive(self, message: Message) -> None: ...

    def flush(self) -> None: ...

    async def leave(self) -> None: ...

    def on_reconnected(self) -> None: ...

    def on_session_lost(self) -> None: ...

    def end(self, error: ClientError | None) -> None: ...


def test_topic_goes_to_the_receiver_added_last() -> None:
    dispatcher = TopicDispatcher()
    wide, narrow = RecordingReceiver(), RecordingReceiver()
    assert not dispatcher and dispatcher.find("$queue/a") is None
    dispatcher.add("$queue/#", wide)
    dispatcher.add("$queue/responses/x/+", narrow)
    for _ in range(2):  # the second time from the cache
        assert dispatcher.find("$queue/responses/x/1") is narrow
        assert dispatcher.find("$queue/a") is wide
        assert dispatcher.find("plain") is None
    assert dispatcher.receivers() == [narrow, wide]
    dispatcher.remove(narrow)
    assert dispatcher.find("$queue/responses/x/1") is wide


def test_topic_cache_is_bounded() -> None:
    dispatcher = TopicDispatcher()
    receiver = RecordingReceiver()
    dispatcher.add("t/#", receiver)
    assert all(
        dispatcher.find(f"t/{number}") is receiver for number in range(MAX_CACHED_TOPICS * 2 + 1)
    )
    assert len(dispatcher._cache) <= MAX_CACHED_TOPICS
