"""The coordination KV in etcd: keys below `/sluice/<cluster>/`, with etcd's leases and watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

from sluice.cluster.etcd import etcd_pb2 as pb
from sluice.cluster.etcd.etcd_client import EtcdClient
from sluice.cluster.membership import Change, CoordinatorError, CoordinatorUnavailable, Lease

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.05  # before a watch is reopened


class EtcdKv:
    """A `CoordinationKv` in etcd."""

    def __init__(self, client: EtcdClient, cluster: str) -> None:
        self._client = client
        self._prefix = f"/sluice/{cluster}/".encode()
        self._end = self._prefix[:-1] + b"0"  # the first key after the prefix
        self._watch_task: asyncio.Task[None] | None = None

    def watch(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        self._watch_task = asyncio.get_running_loop().create_task(
            self._watch_loop(on_snapshot, on_changes)
        )

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
            self._watch_task = None
        await self._client.close()

    async def _watch_loop(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        revision = 0  # up to which we have received all changes; 0: list all keys
        while True:
            try:
                if revision == 0:
                    listed = await self._client.range(self._prefix, self._end)
                    on_snapshot({self._name(one.key): one.value for one in listed.kvs})
                    revision = listed.header.revision
                revision = await self._watch_from(revision, on_changes)
            except CoordinatorUnavailable as fault:
                log.warning("coordinator not reachable", extra={"fault": str(fault)})
            except CoordinatorError as fault:
                log.error("coordinator refused a request", extra={"fault": str(fault)})
                await asyncio.sleep(1.0)
            await asyncio.sleep(RETRY_SECONDS)

    async def _watch_from(
        self, revision: int, on_changes: Callable[[Sequence[Change]], None]
    ) -> int:
        """Report changes after `revision` until the watch ends.

        Return the last reported revision, or 0 if changes were missed.
        """
        async for answer in self._client.watch(self._prefix, self._end, revision + 1):
            if answer.canceled:
                if answer.compact_revision:
                    return 0  # etcd has compacted changes that we have not received
                return revision
            if answer.events:
                on_changes([self._change(event) for event in answer.events])
                # Not the header's revision: a watch that catches up has not sent all up to it.
                revision = max(event.kv.mod_revision for event in answer.events)
        return revision

    def _change(self, event: pb.Event) -> Change:
        value = event.kv.value if event.type == pb.Event.PUT else None
        return self._name(event.kv.key), value

    def _name(self, key: bytes) -> str:
        return key[len(self._prefix) :].decode(errors="replace")

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    async def grant(self, seconds: float) -> Lease:
        answer = await self._client.grant(ceil(seconds))
        return Lease(str(answer.ID), float(answer.TTL))

    async def keep_alive(self, lease: Lease) -> bool:
        return await self._client.keep_alive(int(lease.id)) > 0

    async def revoke(self, lease: Lease) -> None:
        await self._client.revoke(int(lease.id))

    async def put_with_lease(self, key: str, value: bytes, lease: Lease) -> None:
        put = pb.PutRequest(key=self._key(key), value=value, lease=int(lease.id))
        await self._client.txn(pb.TxnRequest(success=[pb.RequestOp(request_put=put)]))

    async def compare_and_swap(
        self, key: str, old: bytes | None, new: bytes | None, guard: str = ""
    ) -> bytes | None:
        name = self._key(key)
        conditions = [self._equals(name, old)]
        if guard:
            conditions.append(
                pb.Compare(
                    result=pb.Compare.GREATER,
                    target=pb.Compare.VERSION,
                    key=self._key(guard),
                    version=0,
                )
            )
        if new is None:
            write = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=name))
        else:
            write = pb.RequestOp(request_put=pb.PutRequest(key=name, value=new))
        read = pb.RequestOp(request_range=pb.RangeRequest(key=name))
        answer = await self._client.txn(
            pb.TxnRequest(compare=conditions, success=[write], failure=[read])
        )
        if answer.succeeded:
            return new
        found = answer.responses[0].response_range.kvs
        return found[0].value if found else None

    def _equals(self, name: bytes, value: bytes | None) -> pb.Compare:
        if value is None:
            return pb.Compare(
                result=pb.Compare.EQUAL, target=pb.Compare.VERSION, key=name, version=0
            )
        return pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.VALUE, key=name, value=value)

    async def revoke_lease_of(self, key: str) -> None:
        found = (await self._client.range(self._key(key))).kvs
        if found and found[0].lease:
            try:
                await self._client.revoke(found[0].lease)
            except CoordinatorUnavailable:
                raise
            except CoordinatorError:
                return  # the lease has just ended by itself
