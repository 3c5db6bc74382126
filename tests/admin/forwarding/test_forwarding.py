"""What a node does with questions that others have the answer to, with a scripted node in the place of those."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sluice.admin.rest.http_protocol import CONNECTION
from sluice.admin.rest.errors import Busy, FarRefusal, answer_refusal
from sluice.admin.forwarding.rest_forwarding import Relay
from sluice.bulk.staging import Stage
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.directory import Directory

CELLS = 4
LONGEST_SECONDS = 300  # that an answer of the bulk door may take


class Far:
    """The other node."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.answers: dict[
            tuple[str, str], Any
        ] = {}  # by method and the end of the path; an exception is raised

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        for (method, end), answer in self.answers.items():
            if request.method == method and request.url.path.endswith(end):
                if isinstance(answer, Exception):
                    raise answer
                found: httpx.Response = answer
                return found
        return httpx.Response(200, json={"stage": "far-1", "dropped": 1, "committed": True})

    def said(self) -> list[str]:
        return [f"{one.method} {one.url.path.rpartition('/')[2]}" for one in self.asked]


class Near:
    """This node, which has the first two cells, and the relay in it."""

    def __init__(self, far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
        real = httpx.AsyncClient
        monkeypatch.setattr(
            httpx, "AsyncClient", lambda **how: real(transport=httpx.MockTransport(far.handle), **how)
        )
        self.open = [0, 1]
        self.claims = {0: "one-1", 1: "one-1", 2: "two-1", 3: "two-1"}
        nodes = {
            "one-1": NodeInfo("one-1", "one", "127.0.0.1:1", http="127.0.0.1:11"),
            "two-1": NodeInfo("two-1", "two", "127.0.0.1:2", http="127.0.0.1:12"),
        }
        board: Any = SimpleNamespace(nodes=nodes, claims=self.claims, suspicions={})
        self.directory = Directory("c", CELLS, board, lambda: "one-1", lambda: list(self.open))
        self.listed: list[dict[str, str]] = []
        self.relay = Relay(self._app, self.directory)
        self.sent: list[Any] = []
        self.said_something = asyncio.Event()
        self.hangs_up = asyncio.Event()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.dumps(self.listed).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.said_something.set()

    async def _receive(self) -> Any:
        if not self.hangs_up.is_set():
            await self.hangs_up.wait()
        return {"type": "http.disconnect"}

    async def get(self, path: str, **more: Any) -> None:
        scope = {
            "type": "http", "method": "GET", "path": f"/api/v1{path}", "query_string": b"", "headers": [], **more
        }  # fmt: skip
        await self.relay(scope, self._receive, self._send)

    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    def queue_in(self, cell: int) -> str:
        return next(f"q{nth}" for nth in range(1000) if self.directory.cell_of_queue(f"q{nth}") == cell)

    async def commit(self) -> set[str]:
        stage = Stage("near-1", "app", 7, "", None)
        stage.data = b"rows"
        names = [self.queue_in(cell) for cell in range(CELLS)]
        return await self.relay.shares.commit_elsewhere([], "app", 7, [stage], names, False)


@pytest.fixture
def far() -> Far:
    return Far()


@pytest.fixture
def near(far: Far, monkeypatch: pytest.MonkeyPatch) -> Near:
    return Near(far, monkeypatch)


def refusal(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": code, "message": "the queue says no", "do": "Do this"})


# ---- batches


async def test_a_share_is_staged_and_committed_by_the_node_that_has_its_queues(near: Near, far: Far) -> None:
    assert await near.commit() == {near.queue_in(2), near.queue_in(3)}
    assert far.said() == ["POST 7", "POST commit"]
    assert all(one.extensions["timeout"]["read"] > LONGEST_SECONDS for one in far.asked)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_batch"), (409, "queue_full"), (413, "batch_too_large"), (501, "no_arrow")],
)
@pytest.mark.parametrize("at", ["/7", "/commit"])
async def test_what_another_node_refuses_is_refused_in_its_words_and_its_stages_are_dropped(
    near: Near, far: Far, at: str, status: int, code: str
) -> None:
    far.answers["POST", at] = refusal(status, code)
    with pytest.raises(FarRefusal) as refused:
        await near.commit()
    answer = answer_refusal(refused.value)
    assert answer.status_code == status
    assert json.loads(bytes(answer.body)) == {"error": code, "message": "the queue says no", "do": "Do this"}
    assert far.said()[-1] == "DELETE 7"


@pytest.mark.parametrize(
    "answer",
    [
        refusal(503, "stages_full"),
        refusal(500, "fault"),
        refusal(409, "stale_batch"),  # what was staged there was lost with a restart of it
        httpx.Response(502, text="<html>"),
        httpx.Response(404, text="[]"),
        httpx.ReadTimeout(""),
        httpx.ConnectError("refused"),
    ],
)
async def test_what_another_node_could_not_say_is_to_be_said_again(near: Near, far: Far, answer: Any) -> None:
    far.answers["POST", "/commit"] = answer
    with pytest.raises(Busy, match="node two"):
        await near.commit()
    assert far.said() == ["POST 7", "POST commit", "DELETE 7"]


# ---- answers that take their time


class Body(httpx.AsyncByteStream):
    """The begin of an answer, and what comes then: its end, a fault, or nothing for ever."""

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


async def test_the_owner_of_a_range_hears_that_its_reader_has_gone(near: Near, far: Far) -> None:
    stream = Body("nothing")
    far.answers["GET", "/rows"] = httpx.Response(200, stream=stream)
    reading = asyncio.create_task(near.get(f"/bulk/queues/{near.queue_in(2)}/rows"))
    await near.said_something.wait()
    near.hangs_up.set()
    async with asyncio.timeout(10):
        await reading
    assert stream.is_closed
    assert [one["type"] for one in near.sent if one.get("more_body", True) is False] == []


async def test_one_who_waits_for_offsets_may_wait_as_long_as_is_promised(near: Near, far: Far) -> None:
    far.answers["GET", "/offsets"] = httpx.Response(200, stream=Body("end"))
    await near.get(f"/bulk/queues/{near.queue_in(2)}/offsets")
    assert far.asked[0].extensions["timeout"]["read"] > LONGEST_SECONDS
    assert near.sent[0]["status"] == 200 and near.sent[-1]["more_body"] is False


async def test_an_answer_that_breaks_off_is_cut_and_not_begun_again(near: Near, far: Far) -> None:
    far.answers["GET", "/rows"] = httpx.Response(200, stream=Body(httpx.ReadError("gone")))
    aborted: list[bool] = []
    cycle = SimpleNamespace(disconnected=False)

    def abort() -> None:
        aborted.append(True)
        cycle.disconnected = True

    connection = SimpleNamespace(transport=SimpleNamespace(abort=abort), cycle=cycle)
    await near.get(f"/bulk/queues/{near.queue_in(2)}/rows", **{CONNECTION: connection})
    assert [one["type"] for one in near.sent] == ["http.response.start", "http.response.body"]
    assert aborted == [True]


# ---- lists


@pytest.mark.parametrize(
    ("here", "there", "missing"),
    [
        ([0, 1], "2 3", None),
        ([0], "2 3", "1 cell"),  # nobody's, or on its way
        ([0, 1], "", "2 cells"),
        ([0, 1, 2], "3", None),  # it has just moved, whatever the claims say
        ([0, 1], None, None),  # one that does not tell has what it claims
    ],
)
async def test_a_list_says_how_many_cells_it_is_without(
    near: Near, far: Far, here: list[int], there: str | None, missing: str | None
) -> None:
    near.open = here
    near.listed = [{"name": "b"}]
    headers = {} if there is None else {"x-sluice-cells": there}
    far.answers["GET", "/queues"] = httpx.Response(200, json=[{"name": "a"}], headers=headers)
    await near.get("/queues")
    assert json.loads(near.sent[1]["body"]) == [{"name": "a"}, {"name": "b"}]
    assert near.headers().get("x-sluice-missing") == missing


async def test_a_list_says_which_node_gave_no_answer_and_that_a_cell_is_nobodys(near: Near, far: Far) -> None:
    far.answers["GET", "/queues"] = httpx.ConnectError("refused")
    await near.get("/queues")
    assert near.headers()["x-sluice-missing"] == "two"
    del near.claims[3]
    near.sent.clear()
    await near.get("/queues")
    assert near.headers()["x-sluice-missing"] == "two, 1 cell"


async def test_a_list_of_nodes_is_not_without_anything_while_cells_move(near: Near, far: Far) -> None:
    near.open = []
    far.answers["GET", "/nodes"] = httpx.Response(200, json=[{"name": "two"}])
    await near.get("/nodes")
    assert "x-sluice-missing" not in near.headers()


async def test_one_who_is_asked_alone_tells_of_which_cells_it_has_told(near: Near, far: Far) -> None:
    await near.get("/queues", headers=[(b"x-sluice-alone", b"1")])
    assert near.headers()["x-sluice-cells"] == "0 1"
    assert far.asked == []
