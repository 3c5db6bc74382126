"""The requests and the output of each command, by the fields of the REST API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_api import (
    FakeApi,
    Refusal,
    consumer_view,
    dead_letter_view,
    events,
    group_view,
    message_view,
    node_view,
    queue_view,
    trace_view,
)


def detail(name: str = "jobs", **more: Any) -> dict[str, Any]:
    parts = [
        {"number": 0, "first": 3, "next": 9, "messages": 6},
        {"number": 1, "first": 0, "next": 0, "messages": 0},
    ]
    return {
        "stats": queue_view(name, **more),
        "config": {},
        "groups": [group_view()],
        "partitions": parts,
    }


def cells(line: str) -> list[str]:
    """Split a row of a table into cells: two blanks separate them."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


# Queues


def test_create_applies_set_over_config(run: Run, api: FakeApi, tmp_path: Path) -> None:
    api.responses["POST queues"] = detail("tasks/image")
    (tmp_path / "config.json").write_text(
        '{"partitions": 4, "limits": {"overflow": "reject", "retention": "1h"}}'
    )
    changes = [
        "limits.max_queue_depth=5",
        "limits.overflow=drop-oldest",
        'bindings=["a/#"]',
        "schema=null",
    ]
    flags = [flag for change in changes for flag in ("--set", change)]
    ran = run(
        "queue", "create", "$queue/tasks/image", "--config", f"@{tmp_path / 'config.json'}", *flags
    )
    assert ran.code == 0
    assert ran.stdout.startswith("Created tasks/image: 10 partitions")
    assert api.last.body == {
        "name": "tasks/image",
        "partitions": 4,
        "limits": {"overflow": "drop-oldest", "retention": "1h", "max_queue_depth": 5},
        "bindings": ["a/#"],
        "schema": None,
    }


def test_create_reads_a_configuration_from_stdin(run: Run, api: FakeApi) -> None:
    api.responses["POST queues"] = detail()
    assert run("queue", "create", "jobs", "--config", "@-", stdin='{"partitions": 2}').code == 0
    assert api.last.body == {"name": "jobs", "partitions": 2}


@pytest.mark.parametrize(
    "flags",
    [
        ["--config", "{"],
        ["--config", "[]"],
        ["--set", "partitions"],
        ["--set", ".x=1"],
        ["--set", "=1"],
    ],
)
def test_invalid_configuration_is_a_usage_error(run: Run, api: FakeApi, flags: list[str]) -> None:
    ran = run("queue", "create", "jobs", *flags)
    assert (ran.code, api.requests) == (2, [])


def test_missing_file_is_named(run: Run, tmp_path: Path) -> None:
    ran = run("queue", "create", "jobs", "--config", f"@{tmp_path / 'none'}")
    assert ran.code == 1
    assert str(tmp_path / "none") in ran.stderr and "No such file" in ran.stderr


def test_list_omits_dead_letter_queues_and_says_so(run: Run, api: FakeApi) -> None:
    api.responses["GET queues"] = [
        queue_view("dlq/jobs", is_dead_letters=True, total_messages=3),
        queue_view(
            "jobs",
            total_messages=12345,
            inflight_messages=7,
            retrying=2,
            dlq_messages=3,
            enqueue_rate=1234.5,
            ack_rate=0.25,
            groups=1,
        ),
    ]
    ran = run("queue", "list")
    head, row = ran.stdout.splitlines()
    assert cells(head)[:4] == ["queue", "depth", "out", "retry"]
    assert cells(row) == ["jobs", "12,345", "7", "2", "3", "1,234", "0.2", "0"]
    assert "1 dead-letter queue not shown" in ran.stderr
    assert len(run("queue", "list", "--all").stdout.splitlines()) == 3


def test_empty_list_explains_how_to_start(run: Run, api: FakeApi) -> None:
    api.responses["GET queues"] = []
    assert "sluice queue create" in run("queue", "list").stdout


def test_show_prints_stats_groups_and_partitions(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs"] = detail(
        total_messages=6, max_depth=6, bytes=4096, dead={"max_retries": 2, "rejected": 1}
    )
    text = run("queue", "show", "jobs").stdout
    assert "6 of 6, 4.0 KiB, full" in text
    assert "3 (max_retries 2, rejected 1)" in text
    assert "1 partition more, empty" in text
    assert any(cells(line)[:3] == ["work", "6", "4"] for line in text.splitlines())


def test_config_shows_what_differs_from_the_default(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/config"] = {
        "name": "jobs",
        "partitions": 4,
        "limits": {"message_ttl": "7d"},
    }
    rows = [cells(line) for line in run("queue", "config", "jobs").stdout.splitlines()[1:]]
    assert rows == [["name", "jobs"], ["partitions", "4", "10"], ["limits.message_ttl", "7d"]]


def test_config_sends_only_changes_and_shows_them(run: Run, api: FakeApi) -> None:
    api.responses["PUT queues/jobs/config"] = {
        "name": "jobs",
        "partitions": 4,
        "limits": {"max_queue_depth": 5},
    }
    ran = run("queue", "config", "jobs", "--set", "limits.max_queue_depth=5")
    assert api.last.body == {"limits": {"max_queue_depth": 5}}
    assert [cells(line) for line in ran.stdout.splitlines()[1:]] == [
        ["limits.max_queue_depth", "5", "100000"]
    ]


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (["queue", "purge", "jobs"], "POST queues/jobs/purge"),
        (["queue", "delete", "jobs"], "DELETE queues/jobs"),
        (["group", "delete", "jobs", "work"], "DELETE queues/jobs/groups/work"),
        (["dlq", "purge", "jobs", "--all"], "POST queues/jobs/dlq/purge"),
        (["dlq", "retry", "jobs", "--all"], "POST queues/jobs/dlq/retry"),
    ],
)
def test_irreversible_action_requires_confirmation(
    run: Run, api: FakeApi, command: list[str], call: str
) -> None:
    api.responses |= {
        "GET queues/jobs/stats": queue_view(total_messages=3),
        "GET queues/jobs/groups/work": group_view(),
        "GET queues/jobs/dlq": [dead_letter_view("9-0")],
        "POST queues/jobs/purge": {"purged": 3},
        "POST queues/jobs/dlq/purge": {"purged": 1},
        "POST queues/jobs/dlq/retry": {"retried": 1, "skipped": 0, "left": 0},
        "DELETE queues/jobs": None,
        "DELETE queues/jobs/groups/work": None,
    }
    ran = run(*command)
    assert ran.code == 2
    assert "Add --yes" in ran.stderr
    assert call not in api.calls()
    ran = run(*command, "--yes", "--json")
    assert ran.code == 0
    json.loads(ran.stdout)
    assert api.calls()[-1] == call


# Groups


def test_groups_are_listed_created_and_moved(run: Run, api: FakeApi) -> None:
    api.responses |= {
        "GET queues/jobs/groups": [group_view()],
        "POST queues/jobs/groups": group_view("audit", lag=2),
        "POST queues/jobs/groups/work/seek": group_view(lag=9),
    }
    row = cells(run("group", "list", "jobs").stdout.splitlines()[1])
    assert row[:7] == ["work", "6", "4", "1", "1", "2", "1"]
    assert run("group", "create", "jobs", "audit", "--start", "latest").code == 0
    assert api.last.body == {"name": "audit", "start": "latest"}
    assert "9 messages to go" in run("seek", "jobs", "work", "--to", "@1700000000").stdout
    assert api.last.body == {"to": "@1700000000"}


def test_group_shows_its_ledger_and_consumers(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/groups/work"] = group_view(consumers=[consumer_view()])
    text = run("group", "show", "jobs", "work").stdout
    assert "9 enqueued = 4 waiting + 1 delivered + 1 retrying + 2 acked + 1 dead" in text
    assert "worker-1" in text


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "ok"),
        ({"stalled": True}, "stalled"),
        ({"connected": False}, "disconnected"),
        ({"slow": True}, "slow"),
        ({"exclusive": True, "priority": 2}, "ok, exclusive, priority 2"),
    ],
)
def test_consumer_shows_its_state(
    run: Run, api: FakeApi, facts: dict[str, Any], state: str
) -> None:
    api.responses["GET queues/jobs/consumers"] = [
        consumer_view(**facts),
        consumer_view("x", group="other"),
    ]
    row = cells(run("consumers", "jobs", "--group", "work").stdout.splitlines()[1])
    assert row[:5] == ["worker-1", "work", "0-2, 5", "3", "100"]
    assert row[-1] == state
    assert len(json.loads(run("consumers", "jobs", "--json").stdout)) == 2


# Messages


def test_peek_sends_the_requested_options(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/messages"] = [
        message_view(payload="two\nlines"),
        message_view("m-2", None),
    ]
    ran = run("peek", "jobs", "--group", "work", "--partition", "0", "--start", "5", "--limit", "2")
    assert api.last.query == {"group": "work", "partition": "0", "start": "5", "limit": "2"}
    rows = [cells(line) for line in ran.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["m-1", "m-2"]
    assert rows[0][-1] == "two\\nlines"
    assert rows[1][-1] == "(2 B, not text)"


def test_peek_full_shows_properties_and_the_raw_payload(run: Run, api: FakeApi) -> None:
    message = message_view(
        payload='{"a":\n 1}\x1b[2J', key="k", properties=[["site", "north"]], attempt=2
    )
    api.responses["GET queues/jobs/messages"] = [message]
    text = run("peek", "jobs", "--full").stdout
    assert "+ site" in text and "north" in text
    assert "attempt 2" in text
    assert text.endswith('{"a":\n 1}\\x1b[2J\n')


def test_peek_full_shows_the_start_of_a_binary_payload(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/messages"] = [message_view(payload=None)]
    assert run("peek", "jobs", "--full").stdout.endswith("not text: ff ff\n")


# Dead letters


def test_dead_letters_are_listed_with_their_history(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/dlq"] = [dead_letter_view("9-0")]
    flags = [
        "--reason",
        "max_retries",
        "--group",
        "work",
        "--since",
        "2026-03-01T11:00:00",
        "--contains",
        "png",
    ]
    row = cells(run("dlq", "list", "jobs", *flags).stdout.splitlines()[1])
    assert row[:2] == ["9-0", "was-9-0"]
    assert row[3:] == ["max_retries", "work", "3", "not an image", "broken.png"]
    assert api.last.query == {
        "reason": "max_retries",
        "group": "work",
        "since": "2026-03-01T11:00:00.000+00:00",
        "contains": "png",
        "limit": "50",
    }


def test_since_may_be_a_duration(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/dlq"] = []
    run("dlq", "list", "jobs", "--since", "2h")
    assert api.last.query["since"].endswith("+00:00")
    ran = run("dlq", "list", "jobs", "--since", "yesterday")
    assert ran.code == 2
    assert "neither a time nor a duration" in ran.stderr


def test_dead_letter_history_is_shown_as_text(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/dlq/9-0"] = dead_letter_view("9-0")
    text = run("dlq", "show", "jobs", "9-0").stdout
    assert "max_retries: not an image" in text
    assert "was-9-0, queue jobs" in text
    assert "rejectionReason" not in text
    assert text.endswith("broken.png\n")
    assert "rejectionReason" in run("dlq", "show", "jobs", "9-0", "--json").stdout


def test_retry_of_one_needs_no_confirmation(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/dlq/9-0"] = dead_letter_view("9-0")
    api.responses["POST queues/jobs/dlq/9-0/retry"] = {"retried": 1, "skipped": 0, "left": 0}
    ran = run("dlq", "retry", "jobs", "9-0", "--to-all")
    assert (ran.code, ran.stdout) == (0, "Put 1 dead letter back into jobs.\n")
    assert api.last.body == {"to_all": True}


def test_dead_letter_in_flight_is_a_failure(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/dlq/9-0"] = dead_letter_view("9-0")
    api.responses["POST queues/jobs/dlq/9-0/retry"] = {"retried": 0, "skipped": 1, "left": 0}
    ran = run("dlq", "retry", "jobs", "9-0")
    assert (ran.code, ran.stdout) == (1, "")
    assert "a consumer works on it" in ran.stderr


def test_dry_run_counts_and_changes_nothing(run: Run, api: FakeApi) -> None:
    dead_letters = [
        dead_letter_view(f"9-{nth:03}", "rejected" if nth % 3 else "timeout") for nth in range(150)
    ]
    api.responses["GET queues/jobs/dlq"] = lambda asked: [
        one for one in dead_letters if one["message_id"] > asked.query.get("after", "")
    ][: int(asked.query["limit"])]
    text = run("dlq", "retry", "jobs", "--group", "work", "--dry-run").stdout
    assert "150 dead letters in all: rejected 100, timeout 50" in text
    assert len(text.splitlines()) == 7
    reported = json.loads(
        run("dlq", "purge", "jobs", "--group", "work", "--dry-run", "--json").stdout
    )
    assert (reported["would_purge"], reported["more"]) == (150, False)
    assert {one.verb for one in api.requests} == {"GET"}


def test_many_are_redriven_in_batches_until_none_is_left(run: Run, api: FakeApi) -> None:
    left = [1200, 700, 200, 0]
    api.responses["GET queues/jobs/dlq"] = [dead_letter_view("9-0")]
    api.responses["POST queues/jobs/dlq/retry"] = lambda asked: {
        "retried": 500,
        "skipped": 0,
        "left": left.pop(0),
    }
    ran = run("dlq", "retry", "jobs", "--reason", "timeout", "--yes", "--json")
    assert json.loads(ran.stdout) == {"retried": 2000, "skipped": 0, "left": 0}
    assert api.last.body == {"reason": "timeout", "limit": 500, "to_all": False}


def test_redrive_ends_when_only_busy_ones_are_left(run: Run, api: FakeApi) -> None:
    answers = [{"retried": 3, "skipped": 2, "left": 2}, {"retried": 0, "skipped": 2, "left": 2}]
    api.responses["GET queues/jobs/dlq"] = [dead_letter_view("9-0")]
    api.responses["POST queues/jobs/dlq/retry"] = lambda asked: answers.pop(0)
    ran = run("dlq", "retry", "jobs", "--all", "--yes")
    assert (
        "Put 3 dead letters back into jobs, 2 skipped (a consumer works on them, or their queue"
        in ran.stdout
    )


def test_single_busy_one_is_worded_in_singular(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/dlq"] = [dead_letter_view("9-0")]
    api.responses["POST queues/jobs/dlq/retry"] = {"retried": 0, "skipped": 1, "left": 0}
    ran = run("dlq", "retry", "jobs", "--all", "--yes")
    assert "1 skipped (a consumer works on it, or its queue is gone)" in ran.stdout


@pytest.mark.parametrize(
    "chosen", [[], ["9-0", "--all"], ["--all", "--reason", "timeout"], ["9-0", "--group", "g"]]
)
@pytest.mark.parametrize("verb", ["retry", "purge"])
def test_dead_letters_must_be_selected_in_exactly_one_way(
    run: Run, api: FakeApi, verb: str, chosen: list[str]
) -> None:
    ran = run("dlq", verb, "jobs", *chosen, "--yes")
    assert (ran.code, api.requests) == (2, [])


def test_one_dead_letter_is_deleted(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/dlq/9-0"] = dead_letter_view("9-0")
    api.responses["DELETE queues/jobs/dlq/9-0"] = None
    assert json.loads(run("dlq", "purge", "jobs", "9-0", "--yes", "--json").stdout) == {"purged": 1}


# Monitoring


def test_explain_prints_the_summary_first_and_the_remedy_last(run: Run, api: FakeApi) -> None:
    api.responses["GET messages/m-1"] = {"queues": ["jobs"]}
    api.responses["GET queues/jobs/messages/m-1"] = trace_view()
    lines = [line.strip() for line in run("explain", "m-1").stdout.splitlines()]
    assert lines[:2] == ["m-1 in jobs", "m-1 is dead: it failed once in group work."]
    assert "2026-03-01 12:00:01.500  +1.5s → delivered to worker-1, attempt 1" in lines
    assert any(line.endswith("✗ nacked by worker-1, attempt 1: not an image") for line in lines)
    assert any(
        cells(line)[:2] == ["work", "dead"] and "max_retries allows" in line for line in lines
    )
    assert lines[-2:] == ["What to do", "sluice dlq retry jobs m-1"]


def test_explain_of_a_message_in_several_queues_shows_each_history(run: Run, api: FakeApi) -> None:
    api.responses["GET messages/m-1"] = {"queues": ["jobs", "copies"]}
    api.responses["GET queues/jobs/messages/m-1"] = trace_view()
    api.responses["GET queues/copies/messages/m-1"] = trace_view(
        queue="copies", states=[], events=[], dead_letters=[]
    )
    text = run("explain", "m-1").stdout
    assert "m-1 in jobs" in text and "m-1 in copies" in text
    assert len(json.loads(run("explain", "m-1", "--json").stdout)) == 2
    assert json.loads(run("explain", "m-1", "--queue", "jobs", "--json").stdout)["queue"] == "jobs"


def test_unknown_message_exits_with_3(run: Run, api: FakeApi) -> None:
    api.responses["GET messages/m-1"] = {"queues": []}
    ran = run("explain", "m-1")
    assert ran.code == 3
    assert "no queue knows a message 'm-1'" in ran.stderr


def test_doctor_prints_the_first_cause_first_and_exits_with_5(run: Run, api: FakeApi) -> None:
    findings = [
        {
            "code": "no-consumer",
            "what": "Group work has no consumer.",
            "do": "sluice consume jobs --group work --leave",
            "is_fault": True,
        },
        {
            "code": "dead",
            "what": "3 messages are dead.",
            "do": "sluice dlq list jobs",
            "is_fault": True,
        },
        {"code": "depth", "what": "6 messages wait.", "do": "", "is_fault": False},
    ]
    api.responses["GET queues/jobs/diagnosis"] = {
        "queue": "jobs",
        "healthy": False,
        "findings": findings,
    }
    ran = run("doctor", "jobs", "--group", "work")
    assert api.last.query == {"group": "work"}
    assert ran.code == 5
    assert ran.stdout.splitlines() == [
        "✗ Group work has no consumer.",
        "  sluice consume jobs --group work --leave",
        "",
        "Also",
        "✗ 3 messages are dead.",
        "  sluice dlq list jobs",
        "· 6 messages wait.",
    ]
    assert (run("doctor", "jobs", "--json").code, run("doctor", "jobs", "--json").stderr) == (5, "")


def test_doctor_of_a_healthy_queue_exits_with_0(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/diagnosis"] = {"queue": "jobs", "healthy": True, "findings": []}
    ran = run("doctor", "jobs")
    assert (ran.code, ran.stdout) == (0, "✓ jobs is well.\n")


def test_verify_exits_with_5_when_the_ledger_is_wrong(run: Run, api: FakeApi) -> None:
    api.responses["GET verify"] = []
    assert run("verify").code == 0
    assert json.loads(run("verify", "--json").stdout) == {"healthy": True, "faults": []}
    api.responses["GET verify"] = ["jobs/work: 9 enqueued and 8 accounted for"]
    ran = run("verify")
    assert ran.code == 5
    assert "jobs/work: 9 enqueued and 8 accounted for" in ran.stdout
    assert run("verify", "--json").code == 5


def test_top_prints_one_frame_without_a_terminal(run: Run, api: FakeApi) -> None:
    queues = [
        queue_view("a", total_messages=2),
        queue_view("b", total_messages=5),
        queue_view("dlq/a", is_dead_letters=True, total_messages=9),
    ]
    api.responses["GET live"] = events(
        ("hello", {}), ("queues", {"node": node_view(), "queues": queues})
    )
    text = run("top").stdout
    assert text.startswith("local  0.1.0  up 2h 5m")
    assert [cells(line)[0] for line in text.splitlines()[3:]] == ["b", "a"]
    assert [
        cells(line)[0] for line in run("top", "--sort", "name", "--all").stdout.splitlines()[3:]
    ] == [
        "a",
        "b",
        "dlq/a",
    ]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_top_has_one_line_per_queue_and_names_it_in_any_window(
    run: Run, api: FakeApi, columns: int
) -> None:
    queues = [
        queue_view("a" * 300, total_messages=99_999, enqueue_rate=12_345.0),
        queue_view("tasks/image", total_messages=5),
    ]
    api.responses["GET live"] = events(("queues", {"node": node_view(), "queues": queues}))
    head, long, short = run("top", COLUMNS=str(columns)).stdout.splitlines()[-3:]
    assert cells(head)[:2] == ["queue", "depth"]
    assert cells(long)[0].endswith("a…") and cells(long)[1] == "99,999"
    assert cells(short)[:2] == ["tasks/image", "5"]
    assert all(len(line) <= columns for line in (head, long, short))


def test_top_as_json_prints_one_line_per_frame(run: Run, api: FakeApi) -> None:
    frame = {"node": node_view(), "queues": [queue_view()]}
    api.responses["GET live"] = events(("queues", frame), ("queues", frame))
    assert [json.loads(line) for line in run("top", "--json").stdout.splitlines()] == [frame, frame]
    assert len(run("top", "--json", "--once").stdout.splitlines()) == 1


def test_refused_top_reports_the_error(run: Run, api: FakeApi) -> None:
    api.responses["GET live"] = Refusal(
        403, "not_allowed", "mary may not look", "Ask an administrator"
    )
    ran = run("top")
    assert (ran.code, ran.stdout) == (1, "")
    assert "mary may not look" in ran.stderr


def test_nodes_shows_version_and_age(run: Run, api: FakeApi) -> None:
    api.responses["GET node"] = node_view(messages=1234, bytes_received=2048)
    api.responses["GET nodes"] = [node_view(), node_view(name="other")]
    text = run("node").stdout
    assert "2h 5m" in text and "1,234 messages" in text and "2.0 KiB" in text
    assert "plain subscriptions" in text and "kept" not in text
    assert [cells(line)[0] for line in run("nodes").stdout.splitlines()] == [
        "node",
        "local",
        "other",
    ]


# Layout


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal(run: Run, api: FakeApi, columns: int) -> None:
    long = "tasks/image/large/thumbnails/of/every/tenant/in/the/north"
    many = {
        "total_messages": 12_345_678,
        "enqueue_rate": 123_456.0,
        "ack_rate": 123_456.0,
        "inflight": 99_999,
    }
    api.responses |= {
        "GET queues": [
            queue_view(long, **many, retrying=99_999, dlq_messages=99_999, active_consumers=1000)
        ],
        "GET queues/jobs": detail(long, **many),
        "GET queues/jobs/messages": [
            message_view("m" * 36, "x" * 500, key="customer-1234567890", attempt=3)
        ],
        "GET queues/jobs/dlq": [dead_letter_view("9-" + "0" * 20)],
        "GET queues/jobs/consumers": [
            consumer_view("worker-with-a-long-name-" * 3, partitions=[1, 3, 5, 7, 9, 11])
        ],
        "GET queues/jobs/messages/m-1": trace_view(summary="It failed. " * 30),
        "GET live": events(("queues", {"node": node_view(), "queues": [queue_view(long, **many)]})),
        "GET nodes": [node_view(bytes_sent=10**12, messages=10**8)],
    }
    for command in (
        ["queue", "list"],
        ["queue", "show", "jobs"],
        ["peek", "jobs"],
        ["peek", "jobs", "--full"],
        ["dlq", "list", "jobs"],
        ["consumers", "jobs"],
        ["explain", "m-1", "--queue", "jobs"],
        ["top", "--once"],
        ["nodes"],
    ):
        ran = run(*command, COLUMNS=str(columns))
        assert ran.code == 0
        body = ran.stdout.splitlines()[
            : -1 if "--full" in command else None
        ]  # a payload is shown as it is
        assert max(len(line) for line in body) <= columns, ran.stdout
        assert "…" not in ran.stdout or command[0] in ("peek", "dlq", "top"), ran.stdout


def test_long_payload_does_not_truncate_other_columns(run: Run, api: FakeApi) -> None:
    api.responses["GET queues/jobs/messages"] = [message_view("20-0", "x" * 500, key="cat")]
    head, row = run("peek", "jobs", COLUMNS="80").stdout.splitlines()
    assert cells(head) == ["message", "place", "age", "state", "key", "payload"]
    assert cells(row)[0] == "20-0" and cells(row)[3:5] == ["waiting", "cat"]
    assert len(row) == 80 and row.endswith("x…")


def test_numbers_are_not_wrapped_at_80_columns(run: Run, api: FakeApi) -> None:
    api.responses["GET queues"] = [
        queue_view(
            "tasks/image/large", total_messages=12_345_678, dlq_messages=1_234, ack_rate=98_765
        )
    ]
    text = run("queue", "list", COLUMNS="80").stdout
    for number in ("12,345,678", "1,234", "98,765"):
        assert number in text


def test_pipe_gets_whole_values_without_color_or_trailing_blanks(run: Run, api: FakeApi) -> None:
    name = "a-very-long-name/" * 12 + "end"
    api.responses["GET queues"] = [queue_view(name, total_messages=1)]
    text = run("queue", "list").stdout
    assert name in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_escape_sequences_in_names_are_harmless(run: Run, api: FakeApi) -> None:
    evil = "\x1b]0;owned\x07\u202e"
    api.responses |= {
        "GET queues/jobs/consumers": [consumer_view(evil)],
        "GET queues/jobs/messages": [
            message_view(evil, evil, key=evil, consumer=evil, state="delivered")
        ],
        "GET queues/jobs/dlq/9-0": dead_letter_view(evil)
        | {"properties": [[evil, evil]], "headers": {evil: evil}},
        "GET queues/jobs/messages/m-1": trace_view(message_id=evil, summary=evil, queue=evil),
        "GET queues/jobs/diagnosis": Refusal(404, "unknown_queue", evil, evil),
    }
    for command in (
        ["consumers", "jobs"],
        ["peek", "jobs"],
        ["peek", "jobs", "--full"],
        ["dlq", "show", "jobs", "9-0"],
        ["explain", "m-1", "--queue", "jobs"],
        ["doctor", "jobs"],
    ):
        ran = run(*command)
        for sign in ("\x1b", "\x07", "\u202e"):
            assert sign not in ran.stdout + ran.stderr, command


def test_queue_and_group_are_paused_with_a_reason_and_resumed(run: Run, api: FakeApi) -> None:
    api.responses |= {
        "POST queues/jobs/pause": queue_view("jobs"),
        "POST queues/jobs/resume": queue_view("jobs"),
        "POST queues/jobs/groups/work/pause": group_view(),
        "POST queues/jobs/groups/work/resume": group_view(),
    }
    ran = run("queue", "pause", "jobs", "--reason", "fire")
    assert api.last.body == {"reason": "fire"}
    assert "sluice queue resume jobs" in ran.stdout
    assert "Resumed jobs" in run("queue", "resume", "jobs").stdout
    ran = run("group", "pause", "jobs", "work")
    assert "sluice group resume jobs work" in ran.stdout
    assert "6 messages to go" in run("group", "resume", "jobs", "work").stdout


def test_waiting_messages_are_cancelled_and_rescheduled(run: Run, api: FakeApi) -> None:
    counted = {"changed": 2, "in_delivery": 1, "left": 0, "dry_run": False}
    api.responses |= {
        "DELETE queues/jobs/messages/a": None,
        "POST queues/jobs/messages/a/reschedule": {},
        "POST queues/jobs/messages/cancel": counted,
        "POST queues/jobs/messages/reschedule": counted,
    }
    assert run("cancel", "jobs", "a").stdout == "Cancelled 1 message of jobs.\n"
    assert run("reschedule", "jobs", "a", "--in", "10m").code == 0
    assert api.last.body == {"delay": "600s"}
    ran = run("cancel", "jobs", "--key", "k", "--yes")
    assert ran.stdout == "Cancelled 2 messages of jobs, 1 too late: in delivery.\n"
    assert api.last.body == {"key": "k", "limit": 100_000}
    assert run("reschedule", "jobs", "--all", "--now", "--yes", "--json").code == 0
    assert api.last.body == {"delay": "0s", "limit": 100_000}
    assert run("cancel", "jobs", "--all").code == 2  # not confirmed
    for wrong in (
        ["cancel", "jobs"],
        ["cancel", "jobs", "a", "--all"],
        ["reschedule", "jobs", "a"],
    ):
        assert run(*wrong).code == 2


def test_schedules_are_managed_by_commands(run: Run, api: FakeApi) -> None:
    schedule: dict[str, Any] = {
        "name": "nightly",
        "queue": "jobs",
        "cron": "30 2 * * *",
        "every": "",
        "time_zone": "UTC",
        "pause": None,
        "fault": "",
        "next_runs": ["2030-01-31T02:30:00.000Z"],
        "last_runs": [
            {
                "tick": "2030-01-30T02:30:00.000Z",
                "at": "2030-01-30T02:30:01.000Z",
                "outcome": "published",
                "message_id": "nightly@2030-01-30T02:30:00Z",
                "detail": "",
            }
        ],
        "counts": {"published": 7},
    }
    at = "queues/jobs/schedules"
    api.responses |= {
        f"POST {at}": schedule,
        f"PUT {at}/nightly": schedule,
        f"GET {at}": [schedule],
        "GET schedules": [schedule],
        f"GET {at}/nightly": schedule,
        f"POST {at}/nightly/pause": schedule,
        f"POST {at}/nightly/resume": schedule,
        f"POST {at}/nightly/run": schedule["last_runs"][0],
        f"DELETE {at}/nightly": None,
    }
    ran = run("schedule", "add", "jobs", "nightly", "go", "--cron", "30 2 * * *", "--key", "k")
    assert ran.stdout == "Added schedule nightly. Next: 2030-01-31 02:30:00 UTC\n"
    body = api.last.body or {}
    assert (body["name"], body["payload"]) == ("nightly", "go")
    assert (
        "Changed" in run("schedule", "add", "jobs", "nightly", "--every", "1h", "--replace").stdout
    )
    assert "30 2 * * * UTC" in run("schedule", "list").stdout
    assert "nightly" in run("schedule", "list", "jobs").stdout
    assert "published  nightly@2030" in run("schedule", "show", "jobs", "nightly").stdout
    run("schedule", "pause", "jobs", "nightly", "--reason", "holidays")
    assert api.last.body == {"reason": "holidays"}
    assert "Resumed schedule nightly" in run("schedule", "resume", "jobs", "nightly").stdout
    assert "nightly: published nightly@2030" in run("schedule", "run-now", "jobs", "nightly").stdout
    assert run("schedule", "remove", "jobs", "nightly").code == 2  # not confirmed
    assert run("schedule", "remove", "jobs", "nightly", "--yes").code == 0
