"""Forwarding of requests to other nodes, with a scripted node in their place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sluice.admin.forwarding import owner_routing
from sluice.admin.rest.errors import Busy, RemoteRefusal, render_refusal
from sluice.admin.rest.forwarding.request_forwarding import RestForwarder
from sluice.admin.rest.http_protocol import CONNECTION_KEY
from sluice.bulk.staging import Stage
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.membership.directory import Directory

CELLS = 4
LONGEST_SECONDS = 300  # limit of a bulk request


class RemoteNode:
    """The scripted other node."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        # by method and end of the path; an exception is raised
        self.responses: dict[tuple[str, str], Any] = {}

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        for (method, end), answer in self.responses.items():
            if request.method == method and request.url.path.endswith(end):
                if isinstance(answer, Exception):
                    raise answer
                found: httpx.Response = answer
                return found
        return httpx.Response(200, json={"stage": "far-1", "dropped": 1, "committed": True})

    def request_log(self) -> list[str]:
        return [f"{one.method} {one.url.path.rpartition('/')[2]}" for one in self.requests]


class ForwardingNode:
    """This node, which owns the first two cells, with its forwarder."""

    def __init__(self, remote: RemoteNode, monkeypatch: pytest.MonkeyPatch) -> None:
        real = httpx.AsyncClient
        monkeypatch.setattr(
            httpx,
            "AsyncClient",
            lambda **how: real(transport=httpx.MockTransport(remote.handle), **how),
        )
        self.open = [0, 1]
        self.claims = {0: "one-1", 1: "one-1", 2: "two-1", 3: "two-1"}
        nodes = {
            "one-1": NodeInfo("one-1", "one", "127.0.0.1:1", http="127.0.0.1:11"),
            "two-1": NodeInfo("two-1", "two", "127.0.0.1:2", http="127.0.0.1:12"),
        }
        kv: Any = SimpleNamespace(
            nodes=nodes, claims=self.claims, suspicions={}, avoided={}, expected_names=()
        )
        self.directory = Directory("c", CELLS, kv, lambda: "one-1", lambda: list(self.open))
        self.listed: list[dict[str, str]] = []
        self.status = 200  # of this node's own responses
        self.relay = RestForwarder(self._app, self.directory)
        self.sent: list[Any] = []
        self.has_responded = asyncio.Event()
        self.disconnects = asyncio.Event()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.dumps(self.listed).encode()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.has_responded.set()

    async def _receive(self) -> Any:
        if not self.disconnects.is_set():
            await self.disconnects.wait()
        return {"type": "http.disconnect"}

    async def get(self, path: str, **more: Any) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": f"/api/v1{path}",
            "query_string": b"",
            "headers": [],
            **more,
        }
        await self.relay(scope, self._receive, self._send)

    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    def queue_in(self, cell: int) -> str:
        return next(
            f"q{nth}" for nth in range(1000) if self.directory.cell_of_queue(f"q{nth}") == cell
        )

    async def commit(self) -> set[str]:
        stage = Stage("near-1", "app", 7, "", None)
        stage.data = b"rows"
        names = [self.queue_in(cell) for cell in range(CELLS)]
        return await self.relay.distributed_commit.commit_on_other_nodes(
            [], "app", 7, [stage], names, False
        )


@pytest.fixture
def remote() -> RemoteNode:
    return RemoteNode()


@pytest.fixture
def forwarder(remote: RemoteNode, monkeypatch: pytest.MonkeyPatch) -> ForwardingNode:
    return ForwardingNode(remote, monkeypatch)


def refusal(status: int, code: str) -> httpx.Response:
    return httpx.Response(
        status, json={"error": code, "message": "the queue says no", "do": "Do this"}
    )


# ---- batches


async def test_part_of_a_batch_is_staged_and_committed_by_the_owner_of_its_queues(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    assert await forwarder.commit() == {forwarder.queue_in(2), forwarder.queue_in(3)}
    assert remote.request_log() == ["POST 7", "POST commit"]
    assert all(one.extensions["timeout"]["read"] > LONGEST_SECONDS for one in remote.requests)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_batch"), (409, "queue_full"), (413, "batch_too_large"), (501, "no_arrow")],
)
@pytest.mark.parametrize("at", ["/7", "/commit"])
async def test_refusal_of_another_node_is_returned_and_its_stages_are_dropped(
    forwarder: ForwardingNode, remote: RemoteNode, at: str, status: int, code: str
) -> None:
    remote.responses["POST", at] = refusal(status, code)
    with pytest.raises(RemoteRefusal) as refused:
        await forwarder.commit()
    answer = render_refusal(refused.value)
    assert answer.status_code == status
    assert json.loads(bytes(answer.body)) == {
        "error": code,
        "message": "the queue says no",
        "do": "Do this",
    }
    assert remote.request_log()[-1] == "DELETE 7"


@pytest.mark.parametrize(
    "answer",
    [
        refusal(503, "stages_full"),
        refusal(500, "fault"),
        refusal(409, "stale_batch"),  # a restart of the node lost its stages
        httpx.Response(502, text="<html>"),
        httpx.Response(404, text="[]"),
        httpx.ReadTimeout(""),
        httpx.ConnectError("refused"),
    ],
)
async def test_missing_reply_of_another_node_is_reported_as_retryable(
    forwarder: ForwardingNode, remote: RemoteNode, answer: Any
) -> None:
    remote.responses["POST", "/commit"] = answer
    with pytest.raises(Busy, match="node two"):
        await forwarder.commit()
    assert remote.request_log() == ["POST 7", "POST commit", "DELETE 7"]


# ---- slow responses


class Body(httpx.AsyncByteStream):
    """The beginning of a response, then its end, a fault, or nothing."""

    def __init__(self, then: Exception | str) -> None:
        self.is_closed = False
        self._then = then

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"begin"
        if isinstance(self._then, Exception):
            raise self._then
        if self._then == "nothing":
            await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


async def test_owner_of_a_range_is_notified_when_its_reader_disconnects(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    stream = Body("nothing")
    remote.responses["GET", "/rows"] = httpx.Response(200, stream=stream)
    reading = asyncio.create_task(forwarder.get(f"/bulk/queues/{forwarder.queue_in(2)}/rows"))
    await forwarder.has_responded.wait()
    forwarder.disconnects.set()
    async with asyncio.timeout(10):
        await reading
    assert stream.is_closed
    assert [one["type"] for one in forwarder.sent if one.get("more_body", True) is False] == []


async def test_long_poll_for_offsets_may_wait_as_long_as_documented(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    remote.responses["GET", "/offsets"] = httpx.Response(200, stream=Body("end"))
    await forwarder.get(f"/bulk/queues/{forwarder.queue_in(2)}/offsets")
    assert remote.requests[0].extensions["timeout"]["read"] > LONGEST_SECONDS
    assert forwarder.sent[0]["status"] == 200 and forwarder.sent[-1]["more_body"] is False


async def test_interrupted_response_is_cut_and_not_restarted(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    remote.responses["GET", "/rows"] = httpx.Response(200, stream=Body(httpx.ReadError("gone")))
    aborted: list[bool] = []
    cycle = SimpleNamespace(disconnected=False)

    def abort() -> None:
        aborted.append(True)
        cycle.disconnected = True

    connection = SimpleNamespace(transport=SimpleNamespace(abort=abort), cycle=cycle)
    await forwarder.get(
        f"/bulk/queues/{forwarder.queue_in(2)}/rows", **{CONNECTION_KEY: connection}
    )
    assert [one["type"] for one in forwarder.sent] == ["http.response.start", "http.response.body"]
    assert aborted == [True]


# ---- lists


@pytest.mark.parametrize(
    ("here", "there", "missing"),
    [
        ([0, 1], "2 3", None),
        ([0], "2 3", "1 cell"),  # without an owner, or moving
        ([0, 1], "", "2 cells"),
        ([0, 1, 2], "3", None),  # it has just moved; open cells count, not claims
        ([0, 1], None, None),  # a node that does not report its cells has those it claims
    ],
)
async def test_list_reports_how_many_cells_are_missing(
    forwarder: ForwardingNode,
    remote: RemoteNode,
    here: list[int],
    there: str | None,
    missing: str | None,
) -> None:
    forwarder.open = here
    forwarder.listed = [{"name": "b"}]
    headers = {} if there is None else {"x-sluice-cells": there}
    remote.responses["GET", "/queues"] = httpx.Response(200, json=[{"name": "a"}], headers=headers)
    await forwarder.get("/queues")
    assert json.loads(forwarder.sent[1]["body"]) == [{"name": "a"}, {"name": "b"}]
    assert forwarder.headers().get("x-sluice-missing") == missing


async def test_list_reports_nodes_without_reply_and_cells_without_owner(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    remote.responses["GET", "/queues"] = httpx.ConnectError("refused")
    await forwarder.get("/queues")
    assert forwarder.headers()["x-sluice-missing"] == "two"
    del forwarder.claims[3]
    forwarder.sent.clear()
    await forwarder.get("/queues")
    assert forwarder.headers()["x-sluice-missing"] == "two, 1 cell"


async def test_list_of_nodes_is_complete_while_cells_move(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    forwarder.open = []
    remote.responses["GET", "/nodes"] = httpx.Response(200, json=[{"name": "two"}])
    await forwarder.get("/nodes")
    assert "x-sluice-missing" not in forwarder.headers()


async def test_local_list_reports_which_cells_it_covers(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    await forwarder.get("/queues", headers=[(b"x-sluice-alone", b"1")])
    assert forwarder.headers()["x-sluice-cells"] == "0 1"
    assert remote.requests == []


async def test_clients_of_all_nodes_are_one_list(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    forwarder.listed = [{"client": "a"}, {"client": "c"}]
    remote.responses["GET", "/clients"] = httpx.Response(200, json=[{"client": "b"}])
    await forwarder.get("/clients")
    assert json.loads(forwarder.sent[1]["body"]) == [{"client": one} for one in "abc"]


async def test_request_about_a_client_goes_to_the_owner_of_its_cell(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    names = [f"c{nth}" for nth in range(100)]
    far = next(one for one in names if forwarder.directory.cell_of_client(one) == 2)
    near = next(one for one in names if forwarder.directory.cell_of_client(one) == 0)
    remote.responses["GET", far] = httpx.Response(200, stream=Body("end"))
    await forwarder.get(f"/clients/{far}")
    await forwarder.get(f"/clients/{near}")
    assert remote.request_log() == [f"GET {far}"]


async def test_client_whose_session_is_on_another_node_than_its_id_is_found(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    names = [f"c{nth}" for nth in range(100)]
    near = next(one for one in names if forwarder.directory.cell_of_client(one) == 0)
    forwarder.status = 404
    remote.responses["GET", near] = httpx.Response(200, stream=Body("found"))
    await forwarder.get(f"/clients/{near}")
    assert forwarder.sent[0]["status"] == 200 and b"begin" in forwarder.sent[1]["body"]


async def test_client_is_found_while_the_cell_of_its_id_has_no_owner(
    forwarder: ForwardingNode, remote: RemoteNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_routing, "OWNER_WAIT_SECONDS", 0.0)
    far = next(one for one in map(str, range(100)) if forwarder.directory.cell_of_client(one) == 2)
    forwarder.claims.clear()
    await forwarder.get(f"/clients/{far}")
    assert forwarder.sent[0]["status"] == 200  # of this node


async def test_unknown_client_is_reported_after_all_nodes_were_asked(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    far = next(one for one in map(str, range(100)) if forwarder.directory.cell_of_client(one) == 2)
    forwarder.status = 404
    remote.responses["GET", far] = httpx.Response(404, stream=Body("unknown"))
    await forwarder.get(f"/clients/{far}")
    assert forwarder.sent[0]["status"] == 404


async def test_unknown_client_is_reported_when_another_node_does_not_answer(
    forwarder: ForwardingNode, remote: RemoteNode
) -> None:
    near = next(one for one in map(str, range(100)) if forwarder.directory.cell_of_client(one) == 0)
    forwarder.status = 404
    remote.responses["GET", near] = httpx.ReadError("reset")
    await forwarder.get(f"/clients/{near}")
    assert forwarder.sent[0]["status"] == 404


async def test_cell_that_no_node_owns_is_refused_after_a_while(
    forwarder: ForwardingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_routing, "OWNER_WAIT_SECONDS", 0.0)
    del forwarder.claims[2]
    await forwarder.get(f"/queues/{forwarder.queue_in(2)}")
    body = json.loads(forwarder.sent[1]["body"])
    assert forwarder.sent[0]["status"] == 503
    assert body["error"] == "cell_unreachable" and "no node owns it now" in body["message"]
