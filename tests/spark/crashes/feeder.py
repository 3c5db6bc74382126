"""The source of messages of crash_run.py, and the progress of the streams."""

from __future__ import annotations

import threading
import time

import pyarrow as pa

from sluice.spark import BulkClient, Endpoint
from sluice.spark.errors import Refused
from tests.spark.crashes.driver_program import ARCHIVE, MOVER, SOURCE

BATCH_SIZE = 40  # messages per batch
MAX_AHEAD = 200  # more would only prolong the end
POLL_SECONDS = 0.25  # polling more often would disturb the streams


def finished(client: BulkClient) -> dict[str, int]:
    """Return how many messages each stream has finished."""
    return {group: sum(client.progress(SOURCE, group).values()) for group in (MOVER, ARCHIVE)}


class Feeder(threading.Thread):
    """Publishes numbers to the queue, each once, through crashes of the broker.

    Unacknowledged batches are sent again. The feeder stays a few batches ahead of the streams. If
    it cannot continue, it ends, and `fault` is the reason.
    """

    def __init__(self, where: Endpoint) -> None:
        super().__init__(daemon=True)
        self._where = where
        self.fed = 0
        self.ending = threading.Event()
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            with BulkClient(self._where) as self._client:
                self._feed()
        except Exception as fault:
            self.fault = fault

    def _feed(self) -> None:
        batch = 0
        while not self.ending.wait(POLL_SECONDS):
            if self.fed - min(finished(self._client).values()) > MAX_AHEAD:
                continue
            numbers = [b"%d" % nth for nth in range(self.fed, self.fed + BATCH_SIZE)]
            table = pa.table({"value": numbers, "key": [b"%d" % (int(one) % 7) for one in numbers]})
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            until = time.monotonic() + self._where.retry_seconds
            while True:
                try:
                    stage = self._client.stage("feeder", batch, SOURCE, bytes(sink.getvalue()))
                    self._client.commit("feeder", batch, [stage], BATCH_SIZE)
                    break
                except Refused as refusal:
                    # The broker was killed in between; that does not happen several times within
                    # one batch.
                    if refusal.code != "stale_batch" or time.monotonic() > until:
                        raise
            batch += 1
            self.fed += BATCH_SIZE
