"""Commands against a real broker, on pipes and on a terminal."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import TIMEOUT_SECONDS, InProcessShell, Shell
from tests.support.broker_process import Broker, StartBroker


@pytest.fixture(scope="module")
def sluice(broker: Broker) -> Shell:
    return InProcessShell(broker)


def group_stats(sluice: Shell, queue: str, group: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sluice.run("group", "show", queue, group, "--json").stdout)
    return found


def test_published_message_is_stored_unchanged(sluice: Shell) -> None:
    flags = ["--key", "k", "--id", "p-1", "--priority", "7", "--delay", "1h", "--expiry", "2h"]
    flags += [
        "--content-type",
        "text/plain",
        "--property",
        "site=north",
        "--property",
        "site=south=1",
    ]
    ran = sluice.run("publish", "kept/one", "héllo", *flags)
    assert (ran.code, ran.stdout) == (0, "Published p-1 to kept/one.\n")
    (message,) = json.loads(sluice.run("peek", "kept/one", "--json").stdout)
    shown = {
        key: message[key]
        for key in ("message_id", "payload", "key", "priority", "state", "content_type")
    }
    assert shown == {
        "message_id": "p-1",
        "payload": "héllo",
        "key": "k",
        "priority": 7,
        "state": "delayed",
        "content_type": "text/plain",
    }
    assert message["properties"][-2:] == [["site", "north"], ["site", "south=1"]]
    assert message["deliver_at"] and message["expires_at"]
    assert "delivery" in sluice.run("peek", "kept/one", "--full").stdout


def test_each_line_is_a_message_and_a_file_is_one(sluice: Shell, tmp_path: Path) -> None:
    assert (
        sluice.run("publish", "lines", stdin="one\r\n\ntwo\n").stdout
        == "Published 3 messages to lines.\n"
    )
    (tmp_path / "file").write_bytes(b"\xff\x00\nb")
    assert sluice.run("publish", "lines", "--file", str(tmp_path / "file")).code == 0
    assert (
        sluice.run(
            "publish", "lines", "--file", str(tmp_path / "file"), "--lines", "--id", "f"
        ).code
        == 0
    )
    assert sluice.run("publish", "lines", "--count", "2", "again", "--id", "c").code == 0
    found = json.loads(sluice.run("peek", "lines", "--json").stdout)
    payloads = sorted(base64.b64decode(row["payload_base64"]) for row in found)
    assert payloads == sorted(
        [b"one", b"", b"two", b"\xff\x00\nb", b"\xff\x00", b"b", b"again", b"again"]
    )
    assert {row["message_id"] for row in found} >= {"f-1", "f-2", "c-1", "c-2"}


def test_line_is_published_on_arrival_without_waiting_for_the_next(sluice: Shell) -> None:
    process = sluice.start("publish", "slow", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    consumer = sluice.start(
        "consume", "slow", "--create", "-g", "g", "--follow", stdout=subprocess.PIPE
    )
    assert process.stdin is not None and consumer.stdout is not None
    for line in (b"first\n", b"second\n"):
        process.stdin.write(line)
        process.stdin.flush()
        assert consumer.stdout.readline() == line
    consumer.terminate()
    consumer.communicate(timeout=TIMEOUT_SECONDS)
    process.stdin.write(b"half a li")
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, out) == (130, b"Published 2 messages to slow.\n")


def test_refused_publish_reports_the_reason_and_how_many_were_stored(sluice: Shell) -> None:
    assert sluice.run("queue", "create", "small", "--set", "limits.max_queue_depth=2").code == 0
    ran = sluice.run("publish", "small", stdin="1\n2\n3\n4\n")
    assert ran.code == 1
    assert ran.stdout == "Published 2 messages to small.\n"
    assert ran.stderr == (
        "sluice: queue 'small' is full at 2 messages\n"
        "  Add consumers, raise limits.max_queue_depth, or set limits.overflow\n"
    )
    assert sluice.run("publish", "small", "x", "--json").stdout == ""
    assert sluice.run("queue", "config", "small", "--set", "limits.max_queue_depth=3").code == 0
    assert sluice.run("publish", "small", "x").code == 0


def test_publish_without_input_is_reported(sluice: Shell) -> None:
    assert sluice.run("publish", "empty").code == 0
    with sluice.terminal("publish", "empty") as terminal:
        assert terminal.end() == 2
        assert "nothing to publish" in terminal.shown
    assert sluice.run("queue", "show", "empty").code == 3


def test_count_consumes_that_many_and_no_more(sluice: Shell) -> None:
    sluice.run("publish", "counted", stdin="".join(f"{nth}\n" for nth in range(20)))
    ran = sluice.run("consume", "counted", "--group", "g", "--count", "3")
    assert ran.code == 0
    assert len(ran.stdout.splitlines()) == 3
    assert ran.stderr == "3 messages acked\n"
    group = group_stats(sluice, "counted", "g")
    assert (group["ledger"]["acked"], group["ledger"]["waiting"]) == (3, 17)
    rest = sluice.run("consume", "counted", "--group", "g", "--json", "--wait", "1s")
    messages = [json.loads(line) for line in rest.stdout.splitlines()]
    assert {message["attempt"] for message in messages} == {1}
    assert {*ran.stdout.split(), *(message["payload"] for message in messages)} == {
        str(nth) for nth in range(20)
    }
    assert rest.stderr == ""


def test_remaining_messages_were_never_delivered(sluice: Shell) -> None:
    sluice.run("publish", "left", "x", "--count", "5")
    ran = sluice.run("consume", "left", "--group", "g", "--leave", "--wait", "1s")
    assert (ran.stdout, ran.stderr) == ("x\n" * 5, "5 messages given back\n")
    ran = sluice.run("consume", "left", "--group", "g", "--json", "--wait", "1s")
    assert [json.loads(line)["attempt"] for line in ran.stdout.splitlines()] == [1] * 5


def test_nack_counts_and_stores_its_description(sluice: Shell) -> None:
    sluice.run("publish", "failing", "x", "--id", "f-1")
    ran = sluice.run(
        "consume",
        "failing",
        "-g",
        "g",
        "--nack",
        "--count",
        "1",
        "--delay",
        "0s",
        "--description",
        "no good",
    )
    assert ran.stderr == "1 message nacked\n"
    ran = sluice.run("consume", "failing", "-g", "g", "--count", "1", "--json")
    assert json.loads(ran.stdout)["attempt"] == 2


def test_consume_without_messages_suggests_doctor(sluice: Shell) -> None:
    ran = sluice.run("consume", "no-publisher", "--create", "-g", "g", "--wait", "100ms")
    assert (ran.code, ran.stdout) == (0, "")
    assert "sluice doctor no-publisher --group g" in ran.stderr


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_follow_ends_cleanly(sluice: Shell, stop: signal.Signals) -> None:
    queue = f"followed/{stop.name.lower()}"
    process = sluice.start(
        "consume",
        queue,
        "--create",
        "-g",
        "g",
        "--follow",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    sluice.run("publish", queue, "first")
    assert process.stdout.readline() == b"first\n"
    process.send_signal(stop)
    _, notes = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, notes) == (0, b"1 message acked\n")
    group = group_stats(sluice, queue, "g")
    assert (group["ledger"]["acked"], group["lag"], group["consumers"]) == (1, 0, [])


@pytest.mark.parametrize(
    "flags",
    [
        ["--ack", "--nack"],
        ["--leave", "--follow"],
        ["--delay", "1s"],
        ["--nack", "--delay", "soon"],
        ["--wait", "5"],
    ],
)
def test_two_settlement_options_are_a_usage_error(sluice: Shell, flags: list[str]) -> None:
    assert sluice.run("consume", "any", "--group", "g", *flags).code == 2


def test_broken_pipe_is_silent(sluice: Shell) -> None:
    sluice.run("publish", "piped", "x" * 1000, "--count", "1000")
    ran = sluice.pipe("sluice peek piped --limit 1000 --json | head -n 1")
    assert (ran.code, ran.stdout, ran.stderr) == (0, "[\n", "")
    ran = sluice.pipe("sluice peek piped --limit 2 --json | true")  # less than the pipe would hold
    assert (ran.code, ran.stdout, ran.stderr) == (0, "", "")
    ran = sluice.pipe("sluice peek piped --limit 1000 | head -n 1")
    assert (ran.code, ran.stdout.split()[0]) == (0, "message")
    assert "Error" not in ran.stderr and "Exception" not in ran.stderr


def test_messages_not_written_to_a_broken_pipe_stay_in_the_queue(sluice: Shell) -> None:
    sluice.run("publish", "torn", "x" * 100_000, "--count", "20")
    ran = sluice.pipe("sluice consume torn --group g | head -c 10")
    assert (ran.code, ran.stderr) == (0, "")
    ledger = group_stats(sluice, "torn", "g")["ledger"]
    assert ledger["acked"] < 20
    assert ledger["waiting"] == 20 - ledger["acked"]


def test_confirmation_is_asked_on_a_terminal(sluice: Shell) -> None:
    sluice.run("publish", "asked", "x", "--count", "3")
    with sluice.terminal("queue", "purge", "asked") as terminal:
        terminal.wait_for("Throw away up to 3 messages of asked? [y/N]")
        terminal.press("n\n")
        assert terminal.end() == 1
    assert (
        json.loads(sluice.run("queue", "show", "asked", "--json").stdout)["stats"]["total_messages"]
        == 3
    )
    with sluice.terminal("queue", "purge", "asked") as terminal:
        terminal.wait_for("[y/N]")
        terminal.press("y\n")
        assert terminal.end() == 0
        assert "Purged 3 messages of asked." in terminal.shown


def test_terminal_gets_color_unless_disabled(sluice: Shell) -> None:
    sluice.run("publish", "coloured", "x")
    with sluice.terminal("doctor", "coloured") as terminal:
        assert terminal.end() == 5
        assert "\x1b[" in terminal.shown
    sluice.environ["NO_COLOR"] = "1"
    try:
        with sluice.terminal("doctor", "coloured") as terminal:
            terminal.end()
            assert "\x1b[31m" not in terminal.shown and "\x1b[36m" not in terminal.shown
    finally:
        del sluice.environ["NO_COLOR"]


def test_long_operation_shows_progress(sluice: Shell) -> None:
    with sluice.terminal("publish", "long", "x", "--count", "20000") as terminal:
        terminal.wait_for("publishing")
        assert terminal.end() == 0
        assert "Published 20,000 messages to long" in terminal.shown


def test_top_refreshes_until_q(sluice: Shell) -> None:
    sluice.run("publish", "watched/queue", "x", "--count", "7")
    with sluice.terminal("top", "--sort", "name", columns=100) as terminal:
        terminal.wait_for("watched/queue")
        terminal.wait_for("q quit")
        terminal.press("s")
        terminal.wait_for("sort (in)")
        terminal.press("q")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown


def test_top_survives_a_restart_of_the_broker(start_broker: StartBroker) -> None:
    first = start_broker()
    sluice = Shell(first)
    with sluice.terminal("top") as terminal:
        terminal.wait_for("No queues yet")
        first.stop()
        terminal.wait_for("trying again")
        again = start_broker(flags=["--http", first.facts["http"]])
        InProcessShell(again).run("publish", "back", "x")
        terminal.wait_for("back")
        terminal.press("q")
        assert terminal.end() == 0


def test_top_once_and_nodes_print_one_frame(sluice: Shell) -> None:
    frame = json.loads(sluice.run("top", "--once", "--json").stdout)
    assert frame["node"]["name"] == json.loads(sluice.run("node", "--json").stdout)["name"]
    assert [row["name"] for row in frame["queues"]] == [
        row["name"] for row in json.loads(sluice.run("queue", "list", "--json").stdout)
    ]
    assert len(json.loads(sluice.run("nodes", "--json").stdout)) == 1


@pytest.mark.parametrize("name", [".", "..", "../etc", "a/./b"])
def test_name_that_paths_cannot_carry_is_refused(sluice: Shell, name: str) -> None:
    ran = sluice.run("queue", "create", name)
    assert (ran.code, "'.' or '..'" in ran.stderr) == (1, True)
    ran = sluice.run("publish", name, "x")
    assert (ran.code, "'.' or '..'" in ran.stderr) == (1, True)


@pytest.mark.parametrize("dots", [".", ".."])
def test_name_of_dots_never_addresses_something_else(sluice: Shell, dots: str) -> None:
    sluice.run("queue", "create", "dot/victim", "--set", "retry_policy.max_retries=0")
    sluice.run("publish", "dot/victim", "x", "--count", "3", "--id", f"v{len(dots)}")
    sluice.run("consume", "dot/victim", "-g", "g", "--nack", "--count", "2")
    before = json.loads(sluice.run("queue", "show", "dot/victim", "--json").stdout)["stats"]
    for command in (
        ["dlq", "purge", "dot/victim", dots, "--yes"],
        ["dlq", "retry", "dot/victim", dots],
        ["dlq", "show", "dot/victim", dots],
        ["group", "delete", "dot/victim", dots, "--yes"],
        ["seek", "dot/victim", dots, "--to", "latest"],
        ["explain", dots, "--queue", "dot/victim"],
        ["ecq", "purge", dots, "--yes"],
    ):
        ran = sluice.run(*command)
        assert (ran.code, ran.stdout) == (3, ""), (command, ran.stdout, ran.stderr)
    ran = sluice.run("group", "create", "dot/victim", dots)
    assert (ran.code, "another consumer-group" in ran.stderr) == (1, True)
    ran = sluice.run("publish", "dot/victim", "x", "--id", dots)
    assert (ran.code, "message-id" in ran.stderr) == (1, True)
    after = json.loads(sluice.run("queue", "show", "dot/victim", "--json").stdout)["stats"]
    assert [after[key] for key in ("total_messages", "dlq_messages")] == [
        before[key] for key in ("total_messages", "dlq_messages")
    ]


@pytest.mark.parametrize("name", ["...", " ", "a b?c=1&d", "grün/水"])
def test_unusual_names_work_like_others(sluice: Shell, name: str) -> None:
    assert sluice.run("queue", "create", name).code == 0
    assert json.loads(sluice.run("queue", "show", name, "--json").stdout)["stats"]["name"] == name
    assert sluice.run("queue", "delete", name, "--yes").code == 0


def test_group_can_be_created_moved_and_deleted(sluice: Shell) -> None:
    sluice.run("publish", "grouped", "x", "--count", "4")
    sluice.run("queue", "config", "grouped", "--set", "limits.retention=1h")
    assert "4 messages to go" in sluice.run("group", "create", "grouped", "late").stdout
    assert "0 messages to go" in sluice.run("seek", "grouped", "late", "--to", "latest").stdout
    assert "4 messages to go" in sluice.run("seek", "grouped", "late", "--to", "earliest").stdout
    assert sluice.run("seek", "grouped", "late", "--to", "nonsense").code == 1
    assert sluice.run("seek", "grouped", "none", "--to", "latest").code == 3
    assert sluice.run("group", "create", "grouped", "late").code == 1
    assert sluice.run("group", "delete", "grouped", "late", "--yes").code == 0
    assert json.loads(sluice.run("group", "list", "grouped", "--json").stdout) == []


def test_dead_letters_are_deleted_one_or_all(sluice: Shell) -> None:
    sluice.run("queue", "create", "dying", "--set", "retry_policy.max_retries=0")
    sluice.run("publish", "dying", "x", "--count", "3", "--id", "d")
    sluice.run("consume", "dying", "-g", "g", "--nack", "--count", "3")
    assert sluice.run("dlq", "purge", "dying", "d-1", "--yes").code == 0
    assert sluice.run("dlq", "show", "dying", "d-1").code == 3
    assert "x\n" in sluice.run("dlq", "show", "dying", "d-2").stdout
    assert json.loads(sluice.run("dlq", "purge", "dying", "--all", "--yes", "--json").stdout) == {
        "purged": 2
    }


def test_a_deleted_queue_is_gone(sluice: Shell) -> None:
    sluice.run("publish", "passing", "x")
    assert json.loads(sluice.run("queue", "delete", "passing", "--yes", "--json").stdout) == {
        "deleted": "passing"
    }
    for command in (
        ["queue", "show"],
        ["queue", "config"],
        ["peek"],
        ["group", "list"],
        ["consumers"],
        ["dlq", "list"],
    ):
        assert sluice.run(*command, "passing").code == 3, command


def test_store_is_verified_while_its_broker_is_stopped(start_broker: StartBroker) -> None:
    broker = start_broker()
    sluice = InProcessShell(broker)
    sluice.run("publish", "checked", "x", "--count", "5")
    data = str(broker.folder / "data")
    ran = sluice.run("verify", "--data", data)
    assert ran.code == 1
    assert "open in another process" in ran.stderr
    broker.stop()
    ran = sluice.run("verify", "--data", data, "--json")
    assert (ran.code, json.loads(ran.stdout)["messages"]) == (0, 5)
    assert sluice.run("verify", "--data", str(broker.folder / "none")).code == 1


def test_verify_reports_a_torn_log_end_by_its_exit_code_and_changes_nothing(
    start_broker: StartBroker,
) -> None:
    broker = start_broker()
    sluice = InProcessShell(broker)
    sluice.run("publish", "checked", "x", "--count", "5")
    broker.stop()
    data = broker.folder / "data"
    log = data / "00000001.log"
    log.write_bytes(log.read_bytes() + b"half a frame")
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    ran = sluice.run("verify", "--data", str(data))
    assert ran.code == 6
    assert "the end of 00000001.log is torn by 12 B" in ran.stdout
    assert "Every ledger is right" in ran.stdout
    assert {path.name: path.read_bytes() for path in data.iterdir()} == before
    (broker.folder / "other").mkdir()
    (broker.folder / "other" / "notes.txt").write_text("hi")
    ran = sluice.run("verify", "--data", str(broker.folder / "other"))
    assert ran.code == 1 and "there is no store in" in ran.stderr
    assert len(list((broker.folder / "other").iterdir())) == 1


def test_variables_of_the_command_line_are_not_broker_settings(start_broker: StartBroker) -> None:
    start_broker(
        environ={
            "SLUICE_URL": "http://x",
            "SLUICE_TOKEN": "t",
            "SLUICE_MQTT": "y:1",
            "SLUICE_CA": "z",
        }
    )


def completions(sluice: Shell, *words: str, **environ: str) -> list[str]:
    line = {"_SLUICE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["sluice", *words])}
    done = subprocess.run(
        [sys.executable, "-m", "sluice"],
        env={**sluice.environ, **line, "COMP_CWORD": str(len(words)), **environ},
        capture_output=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.stderr == b""
    return done.stdout.decode().split()


def test_tab_completes_commands_queues_and_groups(sluice: Shell) -> None:
    sluice.run("publish", "tabbed/one", "x")
    sluice.run("publish", "tabbed/two", "x")
    sluice.run("group", "create", "tabbed/one", "workers")
    assert completions(sluice, "que") == ["queue"]
    assert completions(sluice, "queue", "show", "tabbed/") == ["tabbed/one", "tabbed/two"]
    assert completions(sluice, "seek", "tabbed/one", "wo") == ["workers"]
    assert completions(sluice, "consume", "tabbed/one", "--group", "") == ["workers"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense://"])
def test_tab_without_a_broker_completes_nothing(sluice: Shell, url: str) -> None:
    assert completions(sluice, "queue", "show", "", SLUICE_URL=url) == []


def test_owners_of_exclusive_queues_are_listed_peeked_and_purged(
    broker: Broker, sluice: Shell
) -> None:
    assert sluice.run("ecq", "list", "unknown-").stdout == (
        "No client whose id begins with 'unknown-' owns an exclusive queue.\n"
    )
    pub = ["mosquitto_pub", "-h", broker.mqtt.host, "-p", str(broker.mqtt.port), "-q", "1"]
    for key, value in (("speed", "80"), ("gear/left", "open"), ("speed", "95")):
        subprocess.run([*pub, "-t", f"$ECQ/w/ecq-car/{key}", "-m", value], check=True, timeout=30)
    (owner,) = json.loads(sluice.run("ecq", "list", "ecq-", "--json").stdout)
    assert (owner["client"], owner["depth"], owner["last_sequence"], owner["acked_at"]) == (
        "ecq-car",
        2,
        3,
        None,
    )
    reported = sluice.run("ecq", "list", "ecq-").stdout
    assert "ecq-car" in reported and "never" in reported and "away" in reported
    assert "2 of 2 keys" in sluice.run("ecq", "show", "ecq-car").stdout
    peeked = sluice.run("ecq", "peek", "ecq-car").stdout
    assert "gear/left" in peeked and "95" in peeked and "80" not in peeked
    assert "95" in sluice.run("ecq", "peek", "ecq-car", "--start", "3", "--full").stdout
    assert (
        sluice.run("ecq", "purge", "ecq-car", "--yes").stdout == "Threw away 2 values of ecq-car.\n"
    )
    assert sluice.run("ecq", "peek", "ecq-car").stdout == "Nothing is kept for ecq-car.\n"
    assert sluice.run("ecq", "show", "ecq-none").code == 3


# Dead letters of plain topics


def test_replay_topic_puts_dead_letters_of_a_queue_back(sluice: Shell, broker: Broker) -> None:
    from sluice.client.sync import Client

    with Client(broker.mqtt.host, broker.mqtt.port) as client:
        client.subscribe("replayed/orders", qos=1)
        client.publisher("replayed-dead").send(
            "one", headers={"originalTopic": "replayed/orders", "rejectionReason": "DeliveryError"}
        )
        ran = sluice.run("dlq", "replay-topic", "$queue/replayed-dead", "--wait", "500ms")
        assert ran.stdout == "Replayed 1 dead letter of $queue/replayed-dead.\n", ran.stderr
        assert next(client.messages()).payload == b"one"


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_replay_topic_takes_over_the_session_that_collected_dead_letters(
    sluice: Shell, broker: Broker, version: str
) -> None:
    from sluice.client.sync import Client

    number = 5 if version == "5" else 4
    name = f"collector-{version}"
    options = {"client_id": name, "clean_start": False, "version": number}
    if number == 5:
        options["session_expiry"] = 60
    with Client(broker.mqtt.host, broker.mqtt.port, **options) as collector:
        collector.subscribe("dead/replayed", qos=1)
    with Client(broker.mqtt.host, broker.mqtt.port, version=number) as client:
        client.subscribe("replayed/one", qos=1)
        bag = '{"originalTopic": "replayed/one"}'
        envelope = f'{{"header": {{"encoding": "utf-8", "bag": {bag}}}, "body": "one"}}'
        client.publish("dead/replayed", envelope, qos=1)
        ran = sluice.run(
            *("dlq", "replay-topic", "dead/replayed", "--client-id", name),
            *("--mqtt-version", version, "--wait", "500ms", "--json"),
        )
        assert json.loads(ran.stdout) == {"replayed": 1, "skipped": 0}
        assert next(client.messages()).payload == b"one"


def test_replay_topic_without_a_session_is_a_usage_error(sluice: Shell) -> None:
    ran = sluice.run("dlq", "replay-topic", "dead/replayed")
    assert ran.code == 2 and "--client-id" in ran.stderr
