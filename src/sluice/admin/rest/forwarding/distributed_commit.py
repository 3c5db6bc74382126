"""Commit of batches for queues of several nodes: each node stages and commits its share.

The node that receives a batch sends all rows to the other nodes, with the names of their queues; so
a row is checked where its queue is. Each cell has its own fence for the batch, so that an
interrupted commit is repeated from the beginning. A refusal by another node becomes a refusal here
with the same text; if a node does not answer, the client repeats the commit. The stages of a failed
share are useless and are dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from starlette.requests import Request

from sluice.admin.rest.errors import Busy, RemoteRefusal
from sluice.bulk.staging import Stage
from sluice.cluster.membership import Directory, NodeInfo
from sluice.errors import SluiceError
from sluice.units import quote_path_segment

if TYPE_CHECKING:
    import httpx  # imported on first use: 5 MB that only a cluster needs

log = logging.getLogger(__name__)

HttpTimeout = tuple[float | None, float | None, float | None, float | None]

FORWARDED_HEADER: Final = "x-sluice-passed-on"  # set by a node: answer locally or refuse
SHARE_HEADER: Final = "x-sluice-share"  # commit only the rows for these queues, a JSON list
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
# A bulk request may take 300 seconds: the other node gives up before this one does.
# Seconds to connect, read, write and get a connection of the pool.
BULK_TIMEOUT: Final[HttpTimeout] = (1.0, 315.0, 60.0, 60.0)
DROP_TIMEOUT_SECONDS: Final = 5.0
RETRY_REMEDY: Final = "Commit the batch again"
TRANSIENT_STATUSES: Final = frozenset({500, 502, 503, 504})


class DistributedCommit:
    def __init__(self, client: httpx.AsyncClient, scheme: str, directory: Directory) -> None:
        self._client = client
        self._scheme = scheme
        self._directory = directory

    async def commit_on_other_nodes(
        self,
        headers: Sequence[tuple[bytes, bytes]],
        app: str,
        batch: int,
        stages: Sequence[Stage],
        names: Sequence[str],
        to_all: bool,
    ) -> set[str]:
        """Let other nodes commit their share of a batch; return the queues of those shares."""
        queues_by_node: dict[str, list[str]] = {}
        nodes = self._directory.nodes()
        for name in names:
            owner = self._directory.owner_of(self._directory.cell_of_queue(name))
            if owner is None or (owner.id != self._directory.node_id and not owner.http):
                raise Busy(
                    f"queue {name!r} is not reachable now", "Commit the batch again in a moment"
                )
            if owner.id != self._directory.node_id:
                queues_by_node.setdefault(owner.id, []).append(name)
        forwarded_headers = [
            (name.decode(), value.decode("latin-1"))
            for name, value in headers
            if name == b"authorization"
        ]
        forwarded_headers.append((FORWARDED_HEADER, "1"))
        for node_id, queues in queues_by_node.items():
            node = nodes[node_id]
            url = (
                f"{self._scheme}://{node.http}/api/v1/bulk/stages/{quote_path_segment(app)}/{batch}"
            )
            try:
                await self._commit(node, url, forwarded_headers, stages, queues, to_all)
            except BaseException:
                await self._drop(node, url, forwarded_headers)
                raise
        return {name for queues in queues_by_node.values() for name in queues}

    async def _commit(
        self,
        node: NodeInfo,
        url: str,
        headers: list[tuple[str, str]],
        stages: Sequence[Stage],
        queues: list[str],
        to_all: bool,
    ) -> None:
        import httpx

        try:
            found: list[str] = []
            for stage in stages:
                data = (
                    stage.data
                    if stage.path is None
                    else await asyncio.to_thread(stage.path.read_bytes)
                )
                answer = await self._client.post(
                    url,
                    params={"queue": stage.queue},
                    content=data,
                    headers=[*headers, ("content-type", ARROW_TYPE)],
                    timeout=BULK_TIMEOUT,
                )
                _check_response(answer, node)
                found.append(answer.json()["stage"])
            answer = await self._client.post(
                f"{url}/commit",
                json={"stages": found, "to_all": to_all},
                headers=[*headers, (SHARE_HEADER, json.dumps(queues))],
                timeout=BULK_TIMEOUT,
            )
            _check_response(answer, node)
        except httpx.HTTPError as fault:
            raise Busy(
                f"node {node.name} does not answer: {str(fault) or type(fault).__name__}",
                RETRY_REMEDY,
            ) from None

    async def _drop(self, node: NodeInfo, url: str, headers: list[tuple[str, str]]) -> None:
        """Try to drop the stages; otherwise they expire after `bulk.stage_ttl`."""
        import httpx

        with suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(DROP_TIMEOUT_SECONDS):
                await self._client.delete(url, headers=headers)
                return
        log.warning("stages of a share left to expire", extra={"node": node.name})


def forwarded_queues(request: Request) -> list[str]:
    """Return the queues to which a forwarded commit is confined; empty if it is not a share."""
    header = request.headers.get(SHARE_HEADER, "")
    if not header or FORWARDED_HEADER not in request.headers:
        return []
    try:
        names = json.loads(header)
    except ValueError:
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _check_response(answer: httpx.Response, node: NodeInfo) -> None:
    if answer.status_code < 400:
        return
    raise _error_from_response(answer, node)


def _error_from_response(answer: httpx.Response, node: NodeInfo) -> SluiceError:
    try:
        body = answer.json()
        code, what, do = str(body["error"]), str(body["message"]), str(body["do"])
    except (ValueError, TypeError, KeyError):
        return Busy(
            f"node {node.name} sent an unreadable answer ({answer.status_code})",
            RETRY_REMEDY,
        )
    if answer.status_code in TRANSIENT_STATUSES:
        return Busy(f"node {node.name} refuses: {what}", do)
    if code == "stale_batch":  # the stages of this share
        return Busy(f"node {node.name} has lost its stages of the batch: {what}", RETRY_REMEDY)
    return RemoteRefusal(answer.status_code, code, what, do)
