"""Edited redrives and errors of dead letters over REST, and on the command line."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tests.admin.rest.conftest import RestApi
from tests.cli.shell import Shell
from tests.support.broker_process import Broker


async def test_edited_payload_is_text_or_base64(rest_api: RestApi) -> None:
    await rest_api.make_dead_letter("tasks", b"bad 1", b"bad 2")
    (error,) = (await rest_api.ok("GET", "/queues/tasks/dlq-errors"))["errors"]
    assert (error["error"], error["count"], error["groups"]) == ("no good", 2, ["w"])
    assert error["first_at"].endswith("Z")
    first, second = await rest_api.ok("GET", "/queues/tasks/dlq?error=no%20good")
    assert await rest_api.ok("GET", "/queues/tasks/dlq?error=other") == []
    path = "/queues/tasks/dlq"
    both = {"payload": "x", "payload_base64": "eA=="}
    await rest_api.refused(400, "POST", f"{path}/{first['message_id']}/retry", json=both)
    await rest_api.ok("POST", f"{path}/{first['message_id']}/retry", {"payload": "gut ü"})
    data = base64.b64encode(b"\xff\x00").decode()
    await rest_api.ok("POST", f"{path}/{second['message_id']}/retry", {"payload_base64": data})
    found = await rest_api.ok("GET", "/queues/tasks/messages")
    assert {one["payload_base64"] for one in found} == {
        base64.b64encode("gut ü".encode()).decode(),
        data,
    }


def test_command_line_puts_a_dead_letter_back_with_the_payload_of_a_file(
    broker: Broker, tmp_path: Path
) -> None:
    sluice = Shell(broker)
    sluice.run("queue", "create", "edited", "--set", "retry_policy.max_retries=0")
    sluice.run("publish", "edited", "bad", "--id", "edit-1")
    nack = ("--group", "w", "--nack", "--count", "1")
    assert sluice.run("consume", "edited", *nack).code == 0
    file = tmp_path / "fixed.json"
    file.write_bytes(b'{"width": 1}')
    refused = sluice.run("dlq", "retry", "edited", "--all", "--payload-file", str(file))
    assert refused.code == 2 and "for one dead letter" in refused.stderr
    done = sluice.run("dlq", "retry", "edited", "edit-1", "--payload-file", str(file))
    assert done.code == 0, done.stderr
    (message,) = json.loads(sluice.run("peek", "edited", "--json").stdout)
    assert message["payload"] == '{"width": 1}'


async def test_unknown_reason_is_refused_with_the_reasons(rest_api: RestApi) -> None:
    await rest_api.make_dead_letter("tasks", b"a")
    refusal = await rest_api.refused(
        400, "POST", "/queues/tasks/dlq/retry", json={"reason": "bogus"}
    )
    assert "'bogus' is not a reason" in refusal["message"] and "max_retries" in refusal["do"]
    for spelling in ("rejected", "DeliveryError", "delivery-error"):
        assert len(await rest_api.ok("GET", f"/queues/tasks/dlq?reason={spelling}")) == 1
