"""Dead letters grouped by error, and redrives with an edited payload, on every store."""

from __future__ import annotations

import pytest

from sluice.admin.model import DeadLetterFilter
from sluice.admin.queries.dead_letter_errors import normalize_error
from sluice.errors import InvalidPayload, MessageTooLarge
from tests.admin.conftest import MakeHarness
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, settle, take


def reject(harness: BrokerHarness, queue: str, *failures: tuple[bytes, str]) -> None:
    """Publish each payload, and reject it with its description."""
    worker = harness.connect("w-1")
    join(worker, f"$queue/{queue}", consumer_group="w")
    for payload, description in failures:
        harness.publish(payload, queue, partition_key="k")
        (delivery,) = take(worker)
        settle(worker, "reject", delivery, description=description)
        harness.advance(1)
    worker.disconnect()


@pytest.mark.parametrize(
    ("description", "error"),
    [
        ("no width in row 17", "no width in row <n>"),
        ("took 1.5 s,  limit 2", "took <n> s, limit <n>"),
        ("no user 1b4e28ba-2fa1-11d2-883f-0016d3cca427!", "no user <id>!"),
        ("object 0x7f3a at deadbeef01", "object <id> at <id>"),
        ("order 20241231235959 failed", "order <n> failed"),
        ("since 2030-01-31T12:00:00.123Z", "since <time>"),
        ("a feedback", "a feedback"),
        ("", "no description"),
    ],
)
def test_numbers_ids_and_times_do_not_distinguish_errors(description: str, error: str) -> None:
    assert normalize_error(description) == error


async def test_dead_letters_are_counted_by_error_and_selected_by_it(harness: BrokerHarness) -> None:
    reject(
        harness,
        "tasks",
        (b"1", "no width in row 1"),
        (b"2", "no user 7"),
        (b"3", "no width in row 22"),
    )
    admin = harness.admin
    found = await harness.call(admin.dead_letter_errors("tasks"))
    assert (found.examined, found.complete) == (3, True)
    first, second = found.errors
    assert (first.reason, first.error, first.count) == ("rejected", "no width in row <n>", 2)
    assert first.last_at - first.first_at == pytest.approx(2.0)
    assert (first.groups, first.example) == (["w"], "no width in row 22")
    assert second.error == "no user <n>"
    one = DeadLetterFilter(error=first.error)
    listed = await harness.call(admin.dead_letters("tasks", one))
    assert [letter.payload for letter in listed] == [b"1", b"3"]  # words: allowed
    assert (await harness.call(admin.retry_dead_letters("tasks", one))).retried == 2
    assert await harness.call(admin.purge_dead_letters("tasks", one)) == 0
    (left,) = (await harness.call(admin.dead_letter_errors("tasks"))).errors
    assert left == second
    partial = await harness.call(admin.dead_letter_errors("tasks", limit=1))
    assert partial.examined == 1 and partial.complete


async def test_edited_message_goes_back_to_the_group_that_failed_it(
    harness: BrokerHarness,
) -> None:
    other = harness.worker("other-1", "tasks", consumer_group="other")
    reject(harness, "tasks", (b"bad", "no width"))
    take(other)
    (dead_letter,) = await harness.call(harness.admin.dead_letters("tasks"))
    done = await harness.call(
        harness.admin.retry_dead_letter("tasks", dead_letter.message_id, payload=b"good")
    )
    assert done.retried == 1
    assert await harness.call(harness.admin.dead_letters("tasks")) == []
    worker = harness.connect("w-2")
    join(worker, "$queue/tasks", consumer_group="w")
    (delivery,) = take(worker)
    assert delivery.payload == b"good"
    properties = delivery_properties(delivery)
    assert properties["message-id"] == dead_letter.headers["original-message-id"]
    assert properties["partition"] == dead_letter.headers["original-partition"]
    assert take(other) == []


async def test_edited_payload_survives_a_restart_without_the_dead_letter(
    harness: BrokerHarness,
) -> None:
    reject(harness, "tasks", (b"bad", "no width"))
    (dead_letter,) = await harness.call(harness.admin.dead_letters("tasks"))
    await harness.call(
        harness.admin.retry_dead_letter("tasks", dead_letter.message_id, payload=b"")
    )
    harness.restart()
    (message,) = await harness.call(harness.admin.peek("tasks"))
    assert (message.payload, message.key) == (b"", "k")
    assert await harness.call(harness.admin.dead_letters("tasks")) == []


async def test_edited_payload_obeys_the_rules_of_a_publish(make_harness: MakeHarness) -> None:
    harness = make_harness(
        ("tasks", {"limits": {"max_message_size": 10}, "schema": {"type": "object"}})
    )
    reject(harness, "tasks", (b"{}", "no width"))
    (dead_letter,) = await harness.call(harness.admin.dead_letters("tasks"))
    for payload, refusal in ((b"[]", InvalidPayload), (b"x" * 11, MessageTooLarge)):
        with pytest.raises(refusal):
            await harness.call(
                harness.admin.retry_dead_letter("tasks", dead_letter.message_id, payload=payload)
            )
    assert len(await harness.call(harness.admin.dead_letters("tasks"))) == 1
