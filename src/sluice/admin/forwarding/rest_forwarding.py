"""Questions that another node has the answer to: passed on to it as they came, and lists gathered from all.

It stands between the gate and the routes. By then it is known who asks; the other node asks that again, from the same
token, so nodes need not trust each other's word for it. What is passed on is marked, and a question goes on only once:
a cell that has moved meanwhile is looked for anew by whoever was asked first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import httpx
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.admin.rest.middleware import replay, until_gone
from sluice.admin.rest.http_protocol import CONNECTION, cut_off
from sluice.admin.rest.errors import Busy, answer_refusal
from sluice.admin.forwarding.distributed_commit import BULK_TIMEOUT, PASSED, Shares
from sluice.admin.rest.params import plain_name
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.directory import Directory

log = logging.getLogger(__name__)

ALONE: Final = "x-sluice-alone"  # tell what you have yourself, without the other nodes
CELLS: Final = "x-sluice-cells"  # in the answer to that: the cells of which you have told all
MISSING: Final = (
    b"x-sluice-missing"  # in an answer: nodes that a list is without, and how many cells nobody has open
)
API: Final = "/api/v1/"
PATIENCE_SECONDS: Final = 5.0  # for a cell that moves
PAUSE_SECONDS: Final = 0.1
GATHER_SECONDS: Final = 5.0
LIMIT: Final = 1000
TIMEOUT: Final = httpx.Timeout(60.0, connect=1.0)

_HOP: Final = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade proxy-authorization content-length host origin "
    b"referer sec-fetch-site sec-fetch-mode sec-fetch-dest accept-encoding".split()
)


@dataclass(frozen=True)
class Gathered:
    """A list whose parts lie with all nodes: the field that it is sorted by, or none."""

    order: str = ""
    inside: str = ""  # the list is in this field of an object
    in_cells: bool = True  # its parts lie in cells: who has none of a cell open knows nothing of it


GATHERED: Final = {
    "queues": Gathered("name"),
    "ecq": Gathered("client"),
    "nodes": Gathered("name", in_cells=False),
    "verify": Gathered(),
    "losses": Gathered("cell"),
}


class Relay:
    def __init__(self, app: ASGIApp, directory: Directory, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: how the doors of other nodes are known, if they speak HTTPS."""
        self._app = app
        self._directory = directory
        self._scheme = "http" if tls is None else "https"
        self._client = httpx.AsyncClient(
            verify=tls if tls is not None else True,
            timeout=TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=32),
        )
        self.shares = Shares(self._client, self._scheme, directory)

    async def close(self) -> None:
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(API):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        gathered = self._gathered(scope)
        if gathered is not None:
            if ALONE not in headers:
                await self._gather(scope, receive, send, gathered)
                return
            mine, cells = await self._alone(scope, receive)
            mine.headers.append((CELLS.encode(), " ".join(map(str, sorted(cells))).encode()))
            await mine.replay(send)
            return
        cell, receive = await self._cell(scope, receive)
        if cell < 0 or PASSED in headers:
            await self._app(scope, receive, send)
            return
        await self._route(cell, scope, receive, send)

    # ---- one owner

    async def _cell(self, scope: Scope, receive: Receive) -> tuple[int, Receive]:
        """The cell that a question is about, or -1; and what reads its body, if that had to be looked at."""
        directory = self._directory
        levels = [unquote(one) for one in scope["path"][len(API) :].split("/")]
        match levels:
            case ["queues"] if scope["method"] == "POST":
                body = await _whole(receive)
                return directory.cell_of_queue(_name_in(body)), replay(body, receive)
            case ["queues", name, *_] | ["bulk", "queues", name, *_]:
                return directory.cell_of_queue(plain_name(name)), receive
            case ["ecq", client, *_] | ["bulk", "stages", client, *_]:
                return directory.cell_of_client(client), receive
            case ["losses", number, *_] if number.isdecimal() and int(number) < directory.cells:
                return int(number), receive
            case ["live"]:
                queue = parse_qs(scope["query_string"].decode("latin-1")).get("queue", [""])[0]
                return (directory.cell_of_queue(plain_name(queue)) if queue else -1), receive
        return -1, receive

    async def _route(self, cell: int, scope: Scope, receive: Receive, send: Send) -> None:
        """To whoever holds the cell; while nobody does, or it moves, for as long as patience lasts."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_SECONDS
        streamed = "/stages/" in scope["path"]  # such a body is read once, and not kept
        body = b"" if streamed or scope["method"] == "GET" else await _whole(receive)
        while True:
            owner = self._directory.owner(cell)
            if owner is not None:
                if owner.id == self._directory.me:
                    await self._app(scope, receive if streamed else replay(body, receive), send)
                    return
                if owner.http:
                    try:
                        if scope["method"] == "GET":
                            await self._pass_watched(owner, scope, receive, send)
                        else:
                            content = _stream(receive) if streamed else body
                            await self._pass_on(owner, scope, content, send)
                        return
                    except httpx.ConnectError:
                        pass  # nothing was asked yet
                    except httpx.HTTPError as fault:
                        log.warning("a node gave no answer", extra={"node": owner.name, "fault": str(fault)})
                        await self._refuse(scope, receive, send, owner)
                        return
            if loop.time() > until:
                await self._refuse(scope, receive, send, owner)
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, owner: NodeInfo | None) -> None:
        what = "nobody has it now" if owner is None else f"node {owner.name} has it and gives no answer"
        refusal = Busy(f"this part of the cluster cannot be reached: {what}", "Try again in a moment")
        await answer_refusal(refusal)(scope, receive, send)

    async def _pass_watched(self, owner: NodeInfo, scope: Scope, receive: Receive, send: Send) -> None:
        """A question whose answer nobody needs any more when its asker has gone: the owner hears of that too."""
        passing = asyncio.create_task(self._pass_on(owner, scope, b"", send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait([passing, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (passing, gone):
                task.cancel()
            await asyncio.wait([passing, gone])
        if not passing.cancelled():
            passing.result()

    async def _pass_on(
        self, owner: NodeInfo, scope: Scope, content: bytes | AsyncIterator[bytes], send: Send
    ) -> None:
        request = self._request(owner, scope, content)
        answer = await self._client.send(request, stream=True)
        try:
            kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as fault:
            log.warning("an answer was cut short", extra={"node": owner.name, "fault": str(fault)})
            await cut_off(scope.get(CONNECTION))
        finally:
            await answer.aclose()

    def _request(
        self, node: NodeInfo, scope: Scope, content: bytes | AsyncIterator[bytes] = b"", mark: str = PASSED
    ) -> httpx.Request:
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = f"{self._scheme}://{node.http}{(raw.split(b'?')[0] + query).decode('latin-1')}"
        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in _HOP]
        kept.append((mark.encode(), b"1"))
        return self._client.build_request(
            scope["method"], url, headers=kept, content=content or None, timeout=_timeout(scope["path"])
        )

    # ---- all of them

    def _gathered(self, scope: Scope) -> Gathered | None:
        levels = scope["path"][len(API) :].split("/")
        if scope["method"] != "GET":
            return None
        if levels[0] == "messages" and len(levels) == 2:
            return Gathered(inside="queues")
        return GATHERED.get(levels[0]) if len(levels) == 1 else None

    async def _alone(self, scope: Scope, receive: Receive) -> tuple[_Answer, set[int]]:
        """What this node has, and the cells that were open here all the while: a list has all of those."""
        mine = _Answer()
        cells = self._directory.opened()
        await self._app(scope, receive, mine.send)
        return mine, cells & self._directory.opened()

    async def _gather(self, scope: Scope, receive: Receive, send: Send, how: Gathered) -> None:
        others = [node for node in self._directory.others() if node.http]
        fetching = [asyncio.create_task(self._fetch(node, scope)) for node in others]
        try:
            mine, cells = await self._alone(scope, receive)
            if mine.status != 200:
                await mine.replay(send)
                return
            parts = [json.loads(mine.body)]
            silent: list[NodeInfo] = []
            for node, found in zip(others, await asyncio.gather(*fetching)):
                if found is None:
                    silent.append(node)
                    cells |= self._claimed_by(node)
                else:
                    parts.append(found.list)
                    cells |= found.cells
        finally:
            for task in fetching:
                task.cancel()
        limit = parse_qs(scope["query_string"].decode("latin-1")).get("limit", [str(LIMIT)])[0]
        whole = _joined(parts, how, int(limit))
        lacking = self._directory.cells - len(cells) if how.in_cells else 0
        missing = [node.name for node in silent]
        if scope["path"] == f"{API}verify":
            whole += [f"node {name} gave no answer" for name in missing]
        if lacking:
            missing.append("1 cell" if lacking == 1 else f"{lacking} cells")
        if missing:
            mine.headers.append((MISSING, ", ".join(missing).encode()))
        mine.body = json.dumps(whole, separators=(",", ":")).encode()
        await mine.replay(send)

    async def fetch_all(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> list[Any]:
        """A list as the other nodes have it, for one who asks with these headers."""
        scope = {"method": "GET", "path": path, "query_string": b"", "headers": headers}
        others = [node for node in self._directory.others() if node.http]
        found = await asyncio.gather(*(self._fetch(node, scope) for node in others))
        return [one for part in found if part is not None for one in part.list]

    async def _fetch(self, node: NodeInfo, scope: Scope) -> _Part | None:
        try:
            async with asyncio.timeout(GATHER_SECONDS):
                answer = await self._client.send(self._request(node, scope, mark=ALONE))
            if answer.status_code != 200:
                return None
            told = answer.headers.get(CELLS)
            cells = self._claimed_by(node) if told is None else {int(cell) for cell in told.split()}
            return _Part(answer.json(), cells)
        except (httpx.HTTPError, TimeoutError, ValueError) as fault:
            log.warning("a node gave no answer", extra={"node": node.name, "fault": str(fault)})
            return None

    def _claimed_by(self, node: NodeInfo) -> set[int]:
        """For one that does not tell which cells it has open."""
        owners = {cell: self._directory.owner(cell) for cell in range(self._directory.cells)}
        return {cell for cell, owner in owners.items() if owner is not None and owner.id == node.id}


@dataclass(frozen=True)
class _Part:
    """A list as one node has it, and the cells of which it has all."""

    list: Any
    cells: set[int]


class _Answer:
    """What the routes of this node say, kept instead of sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(name, value) for name, value in message["headers"] if name != b"content-length"]
        else:
            self.body += message.get("body", b"")

    async def replay(self, send: Send) -> None:
        headers = [*self.headers, (b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def _timeout(path: str) -> httpx.Timeout:
    if path == f"{API}live":
        return httpx.Timeout(None, connect=1.0)
    return BULK_TIMEOUT if path.startswith(f"{API}bulk/") else TIMEOUT


def _joined(parts: list[Any], how: Gathered, limit: int) -> Any:
    if how.inside:
        return {how.inside: sorted({one for part in parts for one in part[how.inside]})}
    whole = [one for part in parts for one in part]
    if how.order:
        whole.sort(key=lambda one: one[how.order])
    return whole[:limit]


def _name_in(body: bytes) -> str:
    """The name of the queue that is to be made; whatever else is wrong with it, any node can say."""
    try:
        name = json.loads(body).get("name")
    except (ValueError, AttributeError):
        return ""
    return plain_name(name) if isinstance(name, str) else ""


async def _whole(receive: Receive) -> bytes:
    return b"".join([piece async for piece in _stream(receive)])


async def _stream(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return
