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

from sluice.admin.rest.errors import Busy, FarRefusal
from sluice.bulk.staging import Stage
from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.directory import Directory
from sluice.errors import SluiceError
from sluice.units import path_segment

log = logging.getLogger(__name__)

PASSED: Final = "x-sluice-passed-on"  # by another node: answer it, or say that you cannot
SHARE: Final = "x-sluice-share"  # of a batch: only what is for these queues, a list in JSON
ARROW: Final = "application/vnd.apache.arrow.stream"
# An answer of the bulk door may take 300 seconds, by its own account: the other node gives up before we do.
BULK_TIMEOUT: Final = httpx.Timeout(60.0, read=315.0, connect=1.0)
DROP_SECONDS: Final = 5.0
AGAIN: Final = "Commit the batch again"
TRANSIENT: Final = frozenset({500, 502, 503, 504})


class Shares:
    def __init__(self, client: httpx.AsyncClient, scheme: str, directory: Directory) -> None:
        self._client = client
        self._scheme = scheme
        self._directory = directory

    async def commit_elsewhere(
        self,
        headers: Sequence[tuple[bytes, bytes]],
        app: str,
        batch: int,
        stages: Sequence[Stage],
        names: Sequence[str],
        to_all: bool,
    ) -> set[str]:
        """Have other nodes commit what of a batch is for their queues; those queues."""
        shares: dict[str, list[str]] = {}
        nodes = self._directory.nodes()
        for name in names:
            owner = self._directory.owner(self._directory.cell_of_queue(name))
            if owner is None or (owner.id != self._directory.me and not owner.http):
                raise Busy(f"queue {name!r} cannot be reached now", "Commit the batch again in a moment")
            if owner.id != self._directory.me:
                shares.setdefault(owner.id, []).append(name)
        kept = [
            (name.decode(), value.decode("latin-1")) for name, value in headers if name == b"authorization"
        ]
        kept.append((PASSED, "1"))
        for node_id, queues in shares.items():
            node = nodes[node_id]
            url = f"{self._scheme}://{node.http}/api/v1/bulk/stages/{path_segment(app)}/{batch}"
            try:
                await self._commit(node, url, kept, stages, queues, to_all)
            except BaseException:
                await self._drop(node, url, kept)
                raise
        return {name for queues in shares.values() for name in queues}

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
                data = stage.data if stage.path is None else await asyncio.to_thread(stage.path.read_bytes)
                answer = await self._client.post(
                    url,
                    params={"queue": stage.queue},
                    content=data,
                    headers=[*headers, ("content-type", ARROW)],
                    timeout=BULK_TIMEOUT,
                )
                _check(answer, node)
                found.append(answer.json()["stage"])
            answer = await self._client.post(
                f"{url}/commit",
                json={"stages": found, "to_all": to_all},
                headers=[*headers, (SHARE, json.dumps(queues))],
                timeout=BULK_TIMEOUT,
            )
            _check(answer, node)
        except httpx.HTTPError as fault:
            raise Busy(
                f"node {node.name} gives no answer: {str(fault) or type(fault).__name__}", AGAIN
            ) from None

    async def _drop(self, node: NodeInfo, url: str, headers: list[tuple[str, str]]) -> None:
        """As well as it goes: what is left ends by itself after `bulk.stage_ttl`."""
        with suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(DROP_SECONDS):
                await self._client.delete(url, headers=headers)
                return
        log.warning("the stages of a share are left to expire", extra={"node": node.name})


def share_of(request: Request) -> list[str]:
    """The queues to which a commit that another node has passed on is confined; none: it is no share."""
    told = request.headers.get(SHARE, "")
    if not told or PASSED not in request.headers:
        return []
    try:
        names = json.loads(told)
    except ValueError:
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _check(answer: httpx.Response, node: NodeInfo) -> None:
    if answer.status_code < 400:
        return
    raise _refusal(answer, node)


def _refusal(answer: httpx.Response, node: NodeInfo) -> SluiceError:
    try:
        told = answer.json()
        code, what, do = str(told["error"]), str(told["message"]), str(told["do"])
    except (ValueError, TypeError, KeyError):
        return Busy(f"node {node.name} gives no answer that can be read ({answer.status_code})", AGAIN)
    if answer.status_code in TRANSIENT:
        return Busy(f"node {node.name} refuses: {what}", do)
    if code == "stale_batch":
        return Busy(f"node {node.name} has lost its stages of the batch: {what}", AGAIN)  # they were ours
    return FarRefusal(answer.status_code, code, what, do)
