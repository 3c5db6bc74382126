"""Values as payloads, and the parts of a connection that get them."""

from __future__ import annotations

import msgspec
import pydantic
import pytest

from sluice.client.errors import ClientError
from sluice.client.message import Message
from sluice.client.payload_codecs import encode_payload
from sluice.client.queues.publisher import duration_text
from sluice.client.net.dispatcher import MOST_KNOWN, Switch


class Image(pydantic.BaseModel):
    name: str


class Sound(msgspec.Struct):
    name: str


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
    ],
    ids=["bytes", "bytearray", "memoryview", "text", "json", "number", "pydantic", "msgspec"],
)
def test_a_value_becomes_a_payload(value: object, payload: bytes, content_type: str | None) -> None:
    assert encode_payload(value) == (payload, content_type)


def test_what_json_cannot_say_is_told_to_the_caller() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode_payload({"a": object()})


@pytest.mark.parametrize(("given", "text"), [(0, "0ms"), (1.5, "1500ms"), ("2h", "2h")])
def test_durations_are_seconds_or_text(given: float | str, text: str) -> None:
    assert duration_text(given) == text


class Ear:
    def receive(self, message: Message) -> None: ...

    def flush(self) -> None: ...

    async def leave(self) -> None: ...

    def line_is_new(self) -> None: ...

    def session_lost(self) -> None: ...

    def end(self, error: ClientError | None) -> None: ...


def test_a_topic_belongs_to_the_receiver_that_was_added_last() -> None:
    switch = Switch()
    wide, narrow = Ear(), Ear()
    assert not switch and switch.find("$queue/a") is None
    switch.add("$queue/#", wide)
    switch.add("$queue/responses/x/+", narrow)
    for _ in range(2):  # the second time it is known
        assert switch.find("$queue/responses/x/1") is narrow
        assert switch.find("$queue/a") is wide
        assert switch.find("plain") is None
    assert switch.receivers() == [narrow, wide]
    switch.remove(narrow)
    assert switch.find("$queue/responses/x/1") is wide


def test_what_is_known_of_topics_is_bounded() -> None:
    switch = Switch()
    ear = Ear()
    switch.add("t/#", ear)
    assert all(switch.find(f"t/{number}") is ear for number in range(MOST_KNOWN * 2 + 1))
    assert len(switch._known) <= MOST_KNOWN
