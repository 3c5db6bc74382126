"""Batches for queues of several nodes: what of a batch is for another node is staged and committed there.

The node that has the batch sends all its rows on, and the names of the queues that are meant: so rows are judged where
their queue is. Each cell knows the batch by a fence of its own, so one that was broken off is said again from the
beginning. What another node refuses is refused here in its own words; what it could not say is said again by whoever
commits. Stages of a share that failed are of no use to anybody, and are dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import httpx
from starlette.requests import Request

from sluice.admin.rest.errors import Busy, RemoteRefusal
from sluice.bulk.staging import Stage
from sluice.cluster.directory import Directory
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.errors import SluiceError
from sluice.units import quote_path_segment

log = logging.getLogger(__name__)

FORWARDED_HEADER: Final = "x-sluice-passed-on"  # by another node: answer it, or say that you cannot
SHARE_HEADER: Final = "x-sluice-share"  # of a batch: only what is for these queues, a list in JSON
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
# An answer of the bulk door may take 300 seconds, by its own account: the other node gives up before we do.
BULK_TIMEOUT: Final = httpx.Timeout(60.0, read=315.0, connect=1.0)
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
        """Have other nodes commit what of a batch is for their queues; those queues."""
        queues_by_node: dict[str, list[str]] = {}
        nodes = self._directory.nodes()
        for name in names:
            owner = self._directory.owner_of(self._directory.cell_of_queue(name))
            if owner is None or (owner.id != self._directory.node_id and not owner.http):
                raise Busy(
                    f"queue {name!r} cannot be reached now", "Commit the batch again in a moment"
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
                f"node {node.name} gives no answer: {str(fault) or type(fault).__name__}",
                RETRY_REMEDY,
            ) from None

    async def _drop(self, node: NodeInfo, url: str, headers: list[tuple[str, str]]) -> None:
        """As well as it goes: what is left ends by itself after `bulk.stage_ttl`."""
        with suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(DROP_TIMEOUT_SECONDS):
                await self._client.delete(url, headers=headers)
                return
        log.warning("the stages of a share are left to expire", extra={"node": node.name})


def forwarded_queues(request: Request) -> list[str]:
    """The queues to which a commit that another node has passed on is confined; none: it is no share."""
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
            f"node {node.name} gives no answer that can be read ({answer.status_code})",
            RETRY_REMEDY,
        )
    if answer.status_code in TRANSIENT_STATUSES:
        return Busy(f"node {node.name} refuses: {what}", do)
    if code == "stale_batch":
        return Busy(
            f"node {node.name} has lost its stages of the batch: {what}", RETRY_REMEDY
        )  # they were ours
    return RemoteRefusal(answer.status_code, code, what, do)
