"""Errors name what the application did, then why it was refused, then what to do."""

from __future__ import annotations

import pytest

from sluice.client import PublishRefused, QueueConfigRefused, SubscribeRefused, Unsupported
from sluice.client.errors import ConnectRefused
from sluice.testing import VirtualBroker


def test_refusal_has_the_servers_words_first_and_the_reason_code_last() -> None:
    ours = PublishRefused(0x97, "queue 'q' is full (5 messages). Add consumers", None, "to 'q'")
    assert ours.what == (
        "the server refused the message to 'q': queue 'q' is full (5 messages) "
        "(quota exceeded, 0x97)"
    )
    assert ours.remedy == "Add consumers"
    foreign = PublishRefused(0x97, "Too much.", None, "to 'q'")
    assert foreign.what.endswith("Too much (quota exceeded, 0x97)")
    assert "more slowly" in foreign.remedy
    silent = ConnectRefused(0x86)
    assert silent.what == ("the server refused the connection: bad user name or password (0x86)")
    assert silent.remedy == "Check username and password"


async def test_refused_queue_setting_names_queue_and_setting(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client() as client:
        with pytest.raises(QueueConfigRefused, match=r"configuration of queue 'jobs'.*partitionz"):
            await client.declare_queue("jobs", partitionz=3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay": "5 parsecs"}, "delay is '5 parsecs'. Use seconds from 0, or text such as"),
        ({"delay": -1}, "delay is -1"),
        ({"priority": 10}, "priority is 10. Use 0 to 9"),
    ],
)
async def test_impossible_option_is_refused_before_it_is_sent(
    sluice_broker: VirtualBroker, options: dict[str, object], text: str
) -> None:
    async with sluice_broker.client() as client:
        with pytest.raises(Unsupported, match=text):
            await client.publisher("jobs").send("x", **options)  # type: ignore[arg-type]
        assert client.unconfirmed == 0


async def test_refused_subscription_names_its_filter(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        with pytest.raises(SubscribeRefused, match=r"the subscription '\$ECQ/other/#'"):
            await client.subscribe("$ECQ/other/#", qos=1)
