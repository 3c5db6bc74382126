"""How a command reaches the broker, and its errors: addresses, tokens, refusals, exit codes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_api import FakeApi, Raw, Refusal, queue_view

SECRET = "sluice-token-that-must-not-be-shown"


def test_json_output_is_the_response_and_nothing_else(run: Run, api: FakeApi) -> None:
    api.responses["GET queues"] = [queue_view("jobs"), queue_view("dlq/jobs", is_dead_letters=True)]
    ran = run("queue", "list", "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert [row["name"] for row in json.loads(ran.stdout)] == ["jobs", "dlq/jobs"]


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (Refusal(400, "invalid_request", "limit must be from 1", "Use 1 to 1000"), 1),
        (Refusal(403, "not_allowed", "mary may not purge", "Ask an administrator"), 1),
        (Refusal(404, "unknown_queue", "there is no queue 'jobs'", "Create it"), 3),
        (Refusal(409, "queue_full", "queue 'jobs' is full at 5 messages", "Add consumers"), 1),
        (Refusal(503, "stopping", "the server is stopping", "Try again when it is back"), 1),
        (Refusal(500, "fault", "the server has a bug", "Its log has the traceback"), 1),
    ],
)
def test_error_is_one_line_with_the_cause_and_one_with_the_remedy(
    run: Run, api: FakeApi, refusal: Refusal, code: int
) -> None:
    api.responses["GET queues/jobs"] = refusal
    ran = run("queue", "show", "jobs", "--json")
    assert (ran.code, ran.stdout) == (code, "")
    assert ran.stderr == f"sluice: {refusal.body['message']}\n  {refusal.body['do']}\n"


def test_unreachable_address_exits_with_4(run: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ran = run("queue", "list", "--url", url)
    assert (ran.code, ran.stdout) == (4, "")
    assert ran.stderr.startswith(
        f"sluice: the broker at {url} cannot be reached: connection refused\n"
        "  Check that `sluice serve` runs"
    )


@pytest.mark.parametrize(
    "answer",
    [
        Raw(200, "text/html", b"<h1>It works!</h1>"),
        Raw(404, "text/html", b"<h1>Not Found</h1>"),
        Raw(502, "application/json", b'{"detail": "bad gateway"}'),
        Raw(302, "text/html", b"", Location="http://127.0.0.1:1/login"),
    ],
)
def test_server_other_than_sluice_exits_with_4(run: Run, api: FakeApi, answer: Raw) -> None:
    api.responses["GET queues"] = answer
    ran = run("queue", "list")
    assert ran.code == 4
    assert api.url in ran.stderr and "Sluice" in ran.stderr


def test_unreadable_response_is_an_error_line_and_no_traceback(run: Run, api: FakeApi) -> None:
    api.responses["GET queues"] = [{"name": "jobs"}]
    ran = run("queue", "list", SLUICE_TRACEBACK="")
    assert ran.code == 1
    assert "sluice: an answer of the broker cannot be read (KeyError)" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "url", ["mqtt://127.0.0.1:1883", "http://", "http://host:99999", "ftp://x", "http://[::1"]
)
def test_invalid_address_is_a_usage_error(run: Run, url: str) -> None:
    ran = run("queue", "list", "--url", url)
    assert ran.code == 2
    assert "--url is not the address" in ran.stderr


def test_address_may_be_host_and_port(run: Run, api: FakeApi) -> None:
    api.responses["GET queues"] = []
    assert run("queue", "list", "--url", api.url.removeprefix("http://")).code == 0
    assert run("queue", "list", "--url", f"{api.url}/api/v1/").code == 0
    assert len(api.requests) == 2


def test_unknown_option_is_a_usage_error(run: Run) -> None:
    assert run("queue", "list", "--nonsense").code == 2
    assert run("nonsense").code == 2
    assert run("top", "--sort", "nonsense").code == 2


def test_flag_precedes_variable_and_variable_precedes_its_file(
    run: Run, api: FakeApi, tmp_path: Path
) -> None:
    api.responses["GET node"] = Refusal(
        401, "not_authenticated", "the request is not authenticated", ""
    )
    (tmp_path / "a").write_text("from-a-file\n")
    (tmp_path / "b").write_text("from-the-variable's-file\n")

    def token(*flags: str, **environ: str) -> str | None:
        run("node", *flags, **environ)
        return api.last.headers.get("Authorization")

    assert token() is None
    every = {"SLUICE_TOKEN": "variable", "SLUICE_TOKEN_FILE": str(tmp_path / "b")}
    assert token("--token", "flag", "--token-file", str(tmp_path / "a"), **every) == "Bearer flag"
    assert token("--token-file", str(tmp_path / "a"), **every) == "Bearer from-a-file"
    assert token(**every) == "Bearer variable"
    assert token(SLUICE_TOKEN_FILE=str(tmp_path / "b")) == "Bearer from-the-variable's-file"


@pytest.mark.parametrize(
    "answer",
    [
        Refusal(401, "not_authenticated", "the request is not authenticated", ""),
        Raw(200, "text/html", b"?"),
        [{"broken": True}],
    ],
)
def test_secret_is_never_printed(run: Run, api: FakeApi, answer: object) -> None:
    api.responses["GET queues"] = answer
    for flags in (
        ["--token", SECRET],
        ["--url", api.url.replace("http://", f"http://me:{SECRET}@")],
    ):
        ran = run("queue", "list", *flags, SLUICE_TRACEBACK="")
        assert ran.code != 0
        assert SECRET not in ran.stdout + ran.stderr


@pytest.mark.parametrize("token", [f"{SECRET}\u00e9", f"{SECRET}\nX: y", f"{SECRET} {SECRET}"])
def test_invalid_token_is_refused_without_printing_it(run: Run, api: FakeApi, token: str) -> None:
    ran = run("queue", "list", "--token", token, SLUICE_TRACEBACK="")
    assert (ran.code, api.requests) == (2, [])
    assert SECRET not in ran.stderr


def test_unreadable_token_file_is_named(run: Run, tmp_path: Path) -> None:
    ran = run("queue", "list", "--token-file", str(tmp_path / "none"))
    assert ran.code == 1
    assert f"cannot read the token in {tmp_path / 'none'}: No such file" in ran.stderr


def test_unauthorized_error_explains_how_to_give_a_token(run: Run, api: FakeApi) -> None:
    api.responses["GET node"] = Refusal(
        401, "not_authenticated", "the request is not authenticated", "Send a header"
    )
    ran = run("node")
    assert ran.code == 1
    assert "SLUICE_TOKEN, --token-file or --token" in ran.stderr


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tasks/image", "queues/tasks$image/stats"),
        ("$queue/tasks/image", "queues/tasks$image/stats"),
        ("größe 1?", "queues/gr%C3%B6%C3%9Fe%201%3F/stats"),
    ],
)
def test_names_are_encoded_in_paths_as_the_api_expects(
    run: Run, api: FakeApi, name: str, path: str
) -> None:
    run("queue", "purge", name, "--yes")
    assert api.requests[0].path == path


@pytest.mark.parametrize("name", ["a$b", "", "$queue/"])
def test_name_that_would_address_another_queue_is_not_sent(
    run: Run, api: FakeApi, name: str
) -> None:
    assert run("queue", "show", name).code == 2
    assert run("publish", name, "x").code == 2
    assert run("consume", name, "--group", "g").code == 2
    assert api.requests == []


def test_message_id_may_contain_anything(run: Run, api: FakeApi) -> None:
    run("dlq", "show", "jobs", "order/17?x=1#y")
    assert api.last.path == "queues/jobs/dlq/order%2F17%3Fx%3D1%23y"


def test_all_pages_of_a_list_are_read(run: Run, api: FakeApi) -> None:
    names = [f"q{nth:04}" for nth in range(2500)]
    api.responses["GET queues"] = lambda asked: [
        queue_view(name) for name in names if name > asked.query.get("after", "")
    ][: int(asked.query["limit"])]
    found = json.loads(run("queue", "list", "--json").stdout)
    assert [row["name"] for row in found] == names
    assert len(api.requests) == 3
