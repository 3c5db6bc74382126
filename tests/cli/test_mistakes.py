"""Mistyped names and wrong addresses: what is wrong, and what was probably meant."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi, Refusal, dead_letter_view, group_view, queue_view
from tests.support.broker_process import Broker

UNKNOWN_QUEUE = Refusal(404, "unknown_queue", "there is no queue 'order'", "Publish to it")
UNKNOWN_GROUP = Refusal(404, "unknown_group", "queue 'orders' has no group 'wrk'", "Subscribe")


# Names


def test_mistyped_queue_gets_near_names(run: Run, api: FakeApi) -> None:
    api.responses |= {
        "GET queues/order/stats": UNKNOWN_QUEUE,
        "GET queues": [queue_view("orders"), queue_view("invoices")],
    }
    ran = run("queue", "delete", "order", "--yes")
    assert ran.code == 3
    assert ran.stderr == "sluice: there is no queue 'order'\n  Did you mean orders?\n"


def test_unlike_names_leave_the_brokers_advice(run: Run, api: FakeApi) -> None:
    api.responses |= {"GET queues/order/stats": UNKNOWN_QUEUE, "GET queues": [queue_view("xyz")]}
    assert "Publish to it" in run("queue", "delete", "order", "--yes").stderr


def test_mistyped_group_gets_near_names(run: Run, api: FakeApi) -> None:
    api.responses |= {
        "GET queues/orders/groups/wrk": UNKNOWN_GROUP,
        "GET queues/orders/groups": [group_view("work")],
    }
    ran = run("group", "show", "orders", "wrk")
    assert (ran.code, "Did you mean work?" in ran.stderr) == (3, True)


@pytest.mark.parametrize("command", ["list", "retry", "purge"])
def test_dead_letters_of_an_unknown_group_are_an_error(
    run: Run, api: FakeApi, command: str
) -> None:
    api.responses |= {
        "GET queues/orders/dlq": [],
        "GET queues/orders/groups/wrk": UNKNOWN_GROUP,
        "GET queues/orders/groups": [group_view("work")],
    }
    ran = run("dlq", command, "orders", "--group", "wrk")
    assert (ran.code, "Did you mean work?" in ran.stderr) == (3, True)


@pytest.mark.parametrize("command", ["list", "retry", "purge"])
def test_unknown_death_reason_is_a_usage_error(run: Run, api: FakeApi, command: str) -> None:
    ran = run("dlq", command, "orders", "--reason", "max_retry")
    assert (ran.code, "Did you mean max_retries?" in ran.stderr) == (2, True)
    ran = run("dlq", command, "orders", "--reason", "bogus")
    assert (ran.code, "Use max_retries, timeout" in ran.stderr) == (2, True)
    assert api.requests == []


def test_retry_names_the_queue_that_gets_the_messages(run: Run, api: FakeApi) -> None:
    api.responses |= {
        "GET queues/dlq$orders/dlq": [dead_letter_view("9-0")],
        "POST queues/dlq$orders/dlq/retry": {"retried": 1, "skipped": 0, "left": 0},
    }
    ran = run("dlq", "retry", "dlq/orders", "--all", "--yes")
    assert ran.stdout == "Put 1 dead letter back into orders.\n"


def test_backoff_beyond_the_largest_one_is_pointed_out(run: Run, api: FakeApi) -> None:
    policy = {"initial_backoff": "1h", "max_backoff": "5m"}
    api.responses["PUT queues/orders/config"] = {"name": "orders", "retry_policy": policy}
    ran = run("queue", "config", "orders", "--set", "retry_policy.initial_backoff=1h")
    assert "caps every backoff at 5m, so initial_backoff=1h has no effect" in ran.stderr


# Addresses


def test_error_distinguishes_a_port_without_http_from_a_closed_one(
    run: Run, broker: Broker
) -> None:
    ran = run("queue", "list", "--url", f"http://{broker.mqtt}")
    assert ran.code == 4 and "does not answer in HTTP" in ran.stderr
    assert "It may be the MQTT port" in ran.stderr
    ran = run("queue", "list", "--url", f"https://{broker.facts['http']}")
    assert ran.code == 4 and "does not answer in TLS" in ran.stderr
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        ran = run("queue", "list", "--url", f"http://127.0.0.1:{port}")
    assert ran.code == 4 and "cannot be reached: connection refused" in ran.stderr


# Consuming


def test_consume_does_not_create_a_mistyped_queue(run: Run, broker: Broker) -> None:
    address = {"SLUICE_URL": f"http://{broker.facts['http']}", "SLUICE_MQTT": str(broker.mqtt)}
    run("publish", "mistakes/orders", "x", **address)
    options = ["--group", "g", "--wait", "10ms"]
    ran = run("consume", "mistakes/order", *options, **address)
    assert ran.code == 3
    assert "Did you mean mistakes/orders? To create it, add --create" in ran.stderr
    names = [row["name"] for row in json.loads(run("queue", "list", "--json", **address).stdout)]
    assert "mistakes/orders" in names and "mistakes/order" not in names
    ran = run("consume", "mistakes/order", *options, "--create", **address)
    assert ran.code == 0 and "Nothing came" in ran.stderr
    ran = run("consume", "mistakes/orders", "--group", "g", "--wait", "30s", "-n", "1", **address)
    assert ran.stdout == "x\n"


def test_consume_works_without_the_rest_api(run: Run, broker: Broker) -> None:
    address = {"SLUICE_URL": "http://127.0.0.1:9", "SLUICE_MQTT": str(broker.mqtt)}
    ran = run("consume", "mistakes/mqtt", "--group", "g", "--wait", "10ms", **address)
    assert ran.code == 0 and "was not checked: the broker at" in ran.stderr


def test_publish_tells_a_duplicate(run: Run, broker: Broker) -> None:
    address = {"SLUICE_URL": f"http://{broker.facts['http']}", "SLUICE_MQTT": str(broker.mqtt)}
    first = run("publish", "mistakes/twice", "x", "--id", "o1", **address)
    assert first.stdout == "Published o1 to mistakes/twice.\n"
    again = run("publish", "mistakes/twice", "x", "--id", "o1", **address)
    assert (again.code, again.stdout) == (
        0,
        "o1 is in mistakes/twice already: acknowledged, and not stored again.\n",
    )
    ran = run("publish", "mistakes/twice", "x", "--id", "o1", "--json", **address)
    assert json.loads(ran.stdout)["duplicate"] is True
    ran = run("publish", "mistakes/twice", "x", "--id", "o2", "--json", **address)
    assert json.loads(ran.stdout)["duplicate"] is False


# Files


def test_role_of_a_token_has_no_advice_about_users(run: Run, tmp_path: Path) -> None:
    ran = run("token", "add", "ci", "--role", "operatr", "--file", str(tmp_path / "tokens.toml"))
    assert ran.code == 2 and "Did you mean operator?\n" in ran.stderr
    assert "MQTT" not in ran.stderr


def test_missing_password_is_not_called_short(run: Run, tmp_path: Path) -> None:
    ran = run("user", "add", "ann", "--file", str(tmp_path / "users.toml"))
    assert ran.code == 2 and "stdin is empty" in ran.stderr


CONFIG = """
[mqtt]
max_qos = 7
max_packet_sise = 5

[[queues.templates]]
match = "jobs/#"
config = { retry_policy = { max_retry = 3 } }
"""


def test_config_check_reports_every_problem_of_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sluice.toml"
    file.write_text(CONFIG)
    ran = run("config", "check", str(file), SLUICE_URL="", SLUICE_TRACEBACK="1")
    assert ran.code == 2
    assert "mqtt.max_qos = 7" in ran.stdout
    assert "Did you mean mqtt.max_packet_size" in ran.stdout
    file.write_text(CONFIG.partition("[[")[1] + CONFIG.partition("[[")[2])
    ran = run("config", "check", str(file), "--json", SLUICE_URL="")
    assert ran.code == 2
    [problem] = json.loads(ran.stdout)["problems"]
    assert "did you mean retry_policy.max_retries" in problem


def test_config_check_reports_unusable_files_together(run: Run, tmp_path: Path) -> None:
    (tmp_path / "users.toml").write_text("[ann]\n")
    file = tmp_path / "sluice.toml"
    file.write_text(
        f'auth = {{ users = "{tmp_path}/users.toml" }}\n'
        '[[queues.templates]]\nmatch = "jobs/#"\nconfig = { partitions = 0 }\n'
    )
    ran = run("config", "check", str(file), "--json", SLUICE_URL="")
    problems = json.loads(ran.stdout)["problems"]
    assert ran.code == 2 and len(problems) == 2, problems


def test_config_check_accepts_what_serve_accepts(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "sluice.toml"
    file.write_text('http = "off"\n[[queues.templates]]\nmatch = "a"\nconfig = {}\n')
    ran = run("config", "check", str(file))
    assert (ran.code, ran.stdout) == (0, f"✓ {file} can be used, with 1 queue template.\n")
    assert run("config", "check", str(tmp_path / "none.toml")).code == 2
