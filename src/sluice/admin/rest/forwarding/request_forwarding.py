"""Forwarding of REST requests to the owner of the resource, and merging of lists of all nodes.

It runs after the middleware that authenticates and before the routes. The other node authenticates
the request again, from the same token, so nodes need not trust each other's identity claims. A
forwarded request is marked, and is forwarded only once: if a cell has moved meanwhile, the first
node looks up its owner again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.admin.forwarding import GATHER_TIMEOUT_SECONDS, CellUnreachable, OwnerAttempts
from sluice.admin.rest.errors import Busy, render_refusal
from sluice.admin.rest.forwarding.distributed_commit import (
    BULK_TIMEOUT,
    FORWARDED_HEADER,
    DistributedCommit,
    HttpTimeout,
)
from sluice.admin.rest.forwarding.one_node import MERGED_PATHS, READY_PATH, Pages
from sluice.admin.rest.http_protocol import CONNECTION_KEY, abort_response
from sluice.admin.rest.middleware import replay_body, wait_disconnected
from sluice.admin.rest.params import parse_queue_name
from sluice.cluster.membership import Directory, NodeInfo

if TYPE_CHECKING:
    import httpx  # imported on first use: 5 MB that only a cluster needs

log = logging.getLogger(__name__)

LOCAL_ONLY_HEADER: Final = "x-sluice-alone"  # answer with local data, without the other nodes
# In the response to a local-only request: the cells that it covers completely.
CELLS_HEADER: Final = "x-sluice-cells"
# In a response: nodes whose part of a list is missing, and how many cells no node has open.
MISSING_HEADER: Final = b"x-sluice-missing"
API_PREFIX: Final = "/api/v1/"
DEFAULT_LIMIT: Final = 1000
# Seconds to connect, read, write and get a connection of the pool.
REQUEST_TIMEOUT: Final[HttpTimeout] = (1.0, 60.0, 60.0, 60.0)

_HOP_HEADERS: Final = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade proxy-authorization"
    b" content-length host origin referer"
    b" sec-fetch-site sec-fetch-mode sec-fetch-dest accept-encoding".split()
)


@dataclass(frozen=True)
class GatheredList:
    """A list merged from all nodes, and the field that sorts it, if any."""

    sort_field: str = ""
    list_field: str = ""  # the list is in this field of an object
    # The list consists of cells: a node without a cell open knows nothing of its items.
    is_per_cell: bool = True


GATHERED_LISTS: Final = {
    "queues": GatheredList("name"),
    "schedules": GatheredList("name"),
    "ecq": GatheredList("client"),
    "clients": GatheredList("client"),
    "samples": GatheredList("node", is_per_cell=False),
    "nodes": GatheredList("name", is_per_cell=False),
    "verify": GatheredList(),
    "losses": GatheredList("cell"),
}

NOT_FOUND: Final = 404
UNAVAILABLE: Final = 503  # no owner, or a node without the client's cell and its session


class RestForwarder:
    def __init__(
        self, app: ASGIApp, directory: Directory, tls: ssl.SSLContext | None = None
    ) -> None:
        """Wrap `app`. `tls` verifies the other nodes' HTTP listeners, if they use HTTPS."""
        import httpx

        self._app = app
        self._directory = directory
        self._scheme = "http" if tls is None else "https"
        self._client = httpx.AsyncClient(
            verify=tls if tls is not None else True,
            timeout=REQUEST_TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=32),
        )
        self.distributed_commit = DistributedCommit(self._client, self._scheme, directory)

    async def close(self) -> None:
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._directory.process_names and LOCAL_ONLY_HEADER not in headers:
            merge = MERGED_PATHS.get(scope["path"])
            if merge is not None and scope["method"] == "GET":
                await self._merge_processes(scope, receive, send, merge)
                return
            if scope["path"] == READY_PATH:
                await self._check_processes(scope, receive, send)
                return
        if not scope["path"].startswith(API_PREFIX):
            await self._app(scope, receive, send)
            return
        gathered = self._gathered_list(scope)
        if gathered is not None:
            if LOCAL_ONLY_HEADER not in headers:
                await self._gather(scope, receive, send, gathered)
                return
            local_response, cells = await self._answer_locally(scope, receive)
            local_response.headers.append(
                (CELLS_HEADER.encode(), " ".join(map(str, sorted(cells))).encode())
            )
            await local_response.replay(send)
            return
        cell, receive = await self._cell_of_request(scope, receive)
        if cell < 0 or FORWARDED_HEADER in headers:
            await self._app(scope, receive, send)
        elif scope["path"].startswith(f"{API_PREFIX}clients/"):
            await self._forward_to_session(cell, scope, receive, send)
        else:
            await self._forward_to_owner(cell, scope, receive, send)

    # ---- a session

    async def _forward_to_session(
        self, cell: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Ask the owner of the client's cell, and if it knows no such session, all other nodes.

        A session that ends with its connection lives on the node of its client.
        """
        import httpx

        body = b"" if scope["method"] == "GET" else await _read_body(receive)
        response = _BufferedResponse()
        await self._forward_to_owner(cell, scope, replay_body(body, receive), response.send)
        asked = self._directory.owner_of(cell)
        for node in self._directory.nodes().values():
            if response.status not in (NOT_FOUND, UNAVAILABLE):
                break
            if asked is not None and node.id == asked.id:
                continue
            other = _BufferedResponse()
            try:
                if node.id == self._directory.node_id:
                    await self._app(scope, replay_body(body, receive), other.send)
                elif node.http:
                    await self._forward(node, scope, body, other.send)
            except httpx.HTTPError as fault:
                log.warning("node did not answer", extra={"node": node.name, "fault": str(fault)})
            if other.status not in (0, NOT_FOUND, UNAVAILABLE):
                response = other
        await response.replay(send)

    # ---- one owner

    async def _cell_of_request(self, scope: Scope, receive: Receive) -> tuple[int, Receive]:
        """Return the cell of a request, or -1, and a `receive` that replays the body if read."""
        directory = self._directory
        levels = [unquote(one) for one in scope["path"][len(API_PREFIX) :].split("/")]
        match levels:
            case ["queues"] if scope["method"] == "POST":
                body = await _read_body(receive)
                return directory.cell_of_queue(_queue_name_in(body)), replay_body(body, receive)
            case ["queues", name, *_] | ["bulk", "queues", name, *_]:
                return directory.cell_of_queue(parse_queue_name(name)), receive
            case ["ecq" | "clients", client, *_] | ["bulk", "stages", client, *_]:
                return directory.cell_of_client(client), receive
            case ["losses", number, *_] if number.isdecimal() and int(number) < directory.cells:
                return int(number), receive
            case ["live"]:
                queue = parse_qs(scope["query_string"].decode("latin-1")).get("queue", [""])[0]
                return (directory.cell_of_queue(parse_queue_name(queue)) if queue else -1), receive
        return -1, receive

    async def _forward_to_owner(
        self, cell: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Forward to the owner of the cell; retry while it moves or has no owner, up to a limit."""
        import httpx

        is_streamed = "/stages/" in scope["path"]  # such a body is read once and not buffered
        body = b"" if is_streamed or scope["method"] == "GET" else await _read_body(receive)
        try:
            attempts = OwnerAttempts(self._directory, cell)
            while True:
                owner = await attempts.next_owner()
                if owner.id == self._directory.node_id:
                    await self._app(
                        scope, receive if is_streamed else replay_body(body, receive), send
                    )
                    return
                if not owner.http:
                    continue
                try:
                    if scope["method"] == "GET":
                        await self._forward_cancellable(owner, scope, receive, send)
                    else:
                        content = _body_chunks(receive) if is_streamed else body
                        await self._forward(owner, scope, content, send)
                    return
                except httpx.ConnectError:
                    pass  # the request was not sent yet
                except httpx.HTTPError as fault:
                    log.warning(
                        "node did not answer", extra={"node": owner.name, "fault": str(fault)}
                    )
                    raise CellUnreachable(owner) from None
        except CellUnreachable as refusal:
            await render_refusal(refusal)(scope, receive, send)

    async def _forward_cancellable(
        self, owner: NodeInfo, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Forward a request that is cancelled at the owner when its client disconnects."""
        passing = asyncio.create_task(self._forward(owner, scope, b"", send))
        gone = asyncio.create_task(wait_disconnected(receive))
        try:
            await asyncio.wait([passing, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (passing, gone):
                task.cancel()
            await asyncio.wait([passing, gone])
        if not passing.cancelled():
            passing.result()

    async def _forward(
        self, owner: NodeInfo, scope: Scope, content: bytes | AsyncIterator[bytes], send: Send
    ) -> None:
        import httpx

        request = self._build_request(owner, scope, content)
        answer = await self._client.send(request, stream=True)
        try:
            headers = [
                (name.lower(), value)
                for name, value in answer.headers.raw
                if name.lower() not in _HOP_HEADERS
            ]
            await send(
                {"type": "http.response.start", "status": answer.status_code, "headers": headers}
            )
            async for piece in answer.aiter_raw():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as fault:
            log.warning("response was cut short", extra={"node": owner.name, "fault": str(fault)})
            await abort_response(scope.get(CONNECTION_KEY))
        finally:
            await answer.aclose()

    def _build_request(
        self,
        node: NodeInfo,
        scope: Scope,
        content: bytes | AsyncIterator[bytes] = b"",
        marker_header: str = FORWARDED_HEADER,
    ) -> httpx.Request:
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = f"{self._scheme}://{node.http}{(raw.split(b'?')[0] + query).decode('latin-1')}"
        headers = [
            (name, value) for name, value in scope["headers"] if name.lower() not in _HOP_HEADERS
        ]
        headers.append((marker_header.encode(), b"1"))
        return self._client.build_request(
            scope["method"],
            url,
            headers=headers,
            content=content or None,
            timeout=_timeout(scope["path"]),
        )

    # ---- all nodes

    def _gathered_list(self, scope: Scope) -> GatheredList | None:
        levels = scope["path"][len(API_PREFIX) :].split("/")
        if scope["method"] != "GET":
            return None
        if levels[0] == "messages" and len(levels) == 2:
            return GatheredList(list_field="queues")
        return GATHERED_LISTS.get(levels[0]) if len(levels) == 1 else None

    async def _answer_locally(
        self, scope: Scope, receive: Receive
    ) -> tuple[_BufferedResponse, set[int]]:
        """Answer with local data and the cells that were open here throughout the request."""
        local_response = _BufferedResponse()
        cells = self._directory.open_cells()
        await self._app(scope, receive, local_response.send)
        return local_response, cells & self._directory.open_cells()

    async def _gather(
        self, scope: Scope, receive: Receive, send: Send, gathered: GatheredList
    ) -> None:
        others = [node for node in self._directory.other_nodes() if node.http]
        fetching = [asyncio.create_task(self._fetch(node, scope)) for node in others]
        try:
            local_response, cells = await self._answer_locally(scope, receive)
            if local_response.status != 200:
                await local_response.replay(send)
                return
            parts = [json.loads(local_response.body)]
            unreachable: list[NodeInfo] = []
            for node, found in zip(others, await asyncio.gather(*fetching)):
                if found is None:
                    unreachable.append(node)
                    cells |= self._cells_claimed_by(node)
                else:
                    parts.append(found.items)
                    cells |= found.cells
        finally:
            for task in fetching:
                task.cancel()
        limit = parse_qs(scope["query_string"].decode("latin-1")).get(
            "limit", [str(DEFAULT_LIMIT)]
        )[0]
        merged = _merge(parts, gathered, int(limit))
        missing_cells = self._directory.cells - len(cells) if gathered.is_per_cell else 0
        missing = [node.name for node in unreachable]
        if scope["path"] == f"{API_PREFIX}verify":
            merged += [f"node {name} did not answer" for name in missing]
        if missing_cells:
            missing.append("1 cell" if missing_cells == 1 else f"{missing_cells} cells")
        if missing:
            local_response.headers.append((MISSING_HEADER, ", ".join(missing).encode()))
        local_response.body = json.dumps(merged, separators=(",", ":")).encode()
        await local_response.replay(send)

    # ---- one node of several processes

    async def _merge_processes(
        self, scope: Scope, receive: Receive, send: Send, merge: Callable[[Pages], bytes]
    ) -> None:
        """Answer with the merged responses of all processes of this node."""
        others = asyncio.create_task(self._ask_processes(scope))
        local_response = _BufferedResponse()
        await self._app(scope, receive, local_response.send)
        pages: dict[str, bytes | None] = {}
        for name, answer in (await others).items():
            if name == self._directory.node_name:
                pages[name] = local_response.body
            else:
                is_usable = answer is not None and answer.status_code == 200
                pages[name] = answer.content if answer is not None and is_usable else None
        if local_response.status == 200:
            missing = [name for name, page in pages.items() if page is None]
            if missing:
                local_response.headers.append((MISSING_HEADER, ", ".join(missing).encode()))
            local_response.body = merge(pages)
        await local_response.replay(send)

    async def _check_processes(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer whether every process is ready, as the first one that is not."""
        for name, answer in (await self._ask_processes(scope)).items():
            if name == self._directory.node_name:
                continue
            if answer is None:
                refusal = Busy(f"{name} does not answer", "Wait until it has been restarted")
                await render_refusal(refusal)(scope, receive, send)
                return
            if answer.status_code != 200:
                response = _BufferedResponse()
                response.status = answer.status_code
                response.headers = [(b"content-type", b"application/json")]
                response.body = answer.content
                await response.replay(send)
                return
        await self._app(scope, receive, send)

    async def _ask_processes(self, scope: Scope) -> dict[str, httpx.Response | None]:
        """Ask the other processes for their own response; None if one does not answer."""
        import httpx

        nodes = {node.name: node for node in self._directory.other_nodes() if node.http}

        async def ask(name: str) -> httpx.Response | None:
            node = nodes.get(name)
            if node is None:
                return None
            request = self._build_request(node, scope, marker_header=LOCAL_ONLY_HEADER)
            try:
                async with asyncio.timeout(GATHER_TIMEOUT_SECONDS):
                    return await self._client.send(request)
            except (httpx.HTTPError, TimeoutError) as fault:
                log.warning("process did not answer", extra={"node": name, "fault": str(fault)})
                return None

        names = self._directory.process_names
        return dict(zip(names, await asyncio.gather(*(ask(name) for name in names)), strict=True))

    async def fetch_all(self, path: str, headers: Sequence[tuple[bytes, bytes]]) -> list[Any]:
        """Return a list of the other nodes for a client with these headers."""
        scope = {"method": "GET", "path": path, "query_string": b"", "headers": headers}
        others = [node for node in self._directory.other_nodes() if node.http]
        found = await asyncio.gather(*(self._fetch(node, scope) for node in others))
        return [one for part in found if part is not None for one in part.items]

    async def _fetch(self, node: NodeInfo, scope: Scope) -> _NodeList | None:
        import httpx

        try:
            async with asyncio.timeout(GATHER_TIMEOUT_SECONDS):
                answer = await self._client.send(
                    self._build_request(node, scope, marker_header=LOCAL_ONLY_HEADER)
                )
            if answer.status_code != 200:
                return None
            cells_header = answer.headers.get(CELLS_HEADER)
            cells = (
                self._cells_claimed_by(node)
                if cells_header is None
                else {int(cell) for cell in cells_header.split()}
            )
            return _NodeList(answer.json(), cells)
        except (httpx.HTTPError, TimeoutError, ValueError) as fault:
            log.warning("node did not answer", extra={"node": node.name, "fault": str(fault)})
            return None

    def _cells_claimed_by(self, node: NodeInfo) -> set[int]:
        """Return the cells of a node that does not report which ones it has open."""
        owners = {cell: self._directory.owner_of(cell) for cell in range(self._directory.cells)}
        return {cell for cell, owner in owners.items() if owner is not None and owner.id == node.id}


@dataclass(frozen=True)
class _NodeList:
    """The list of one node, and the cells that it covers completely."""

    items: Any
    cells: set[int]


class _BufferedResponse:
    """Buffer the response of the local routes instead of sending it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [
                (name, value) for name, value in message["headers"] if name != b"content-length"
            ]
        else:
            self.body += message.get("body", b"")

    async def replay(self, send: Send) -> None:
        headers = [*self.headers, (b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


def _timeout(path: str) -> HttpTimeout:
    if path == f"{API_PREFIX}live":
        return (1.0, None, None, None)
    return BULK_TIMEOUT if path.startswith(f"{API_PREFIX}bulk/") else REQUEST_TIMEOUT


def _merge(parts: list[Any], gathered: GatheredList, limit: int) -> Any:
    if gathered.list_field:
        return {
            gathered.list_field: sorted(
                {one for part in parts for one in part[gathered.list_field]}
            )
        }
    merged = [one for part in parts for one in part]
    if gathered.sort_field:
        merged.sort(key=lambda one: one[gathered.sort_field])
    return merged[:limit]


def _queue_name_in(body: bytes) -> str:
    """Return the name of the queue to create; "" if invalid, which any node can report."""
    try:
        name = json.loads(body).get("name")
    except (ValueError, AttributeError):
        return ""
    return parse_queue_name(name) if isinstance(name, str) else ""


async def _read_body(receive: Receive) -> bytes:
    return b"".join([piece async for piece in _body_chunks(receive)])


async def _body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return
