"""Where the messages of crash.py come from, and how far the streams are with them."""

from __future__ import annotations

import threading
import time

import pyarrow as pa

from sluice.spark import BulkClient, Endpoint
from sluice.spark.errors import Refused
from tests.spark.crashes.driver_program import ARCHIVE, MOVER, SOURCE

BATCH_SIZE = 40  # messages of a batch of the feeder
MAX_AHEAD = 200  # more would only be more to wait for at the end
POLL_SECONDS = 0.25  # what is looked at more often costs those who work


def finished(bulk_client: BulkClient) -> dict[str, int]:
    """How many messages each stream is done with."""
    return {group: sum(bulk_client.progress(SOURCE, group).values()) for group in (MOVER, ARCHIVE)}


class Feeder(threading.Thread):
    """Numbers into the queue, each once, whatever becomes of the broker: what is not answered is sent again. It stays a
    few batches ahead of the streams. If it cannot go on it ends, and `fault` is why."""

    def __init__(self, where: Endpoint) -> None:
        super().__init__(daemon=True)
        self._where = where
        self.fed = 0
        self.ending = threading.Event()
        self.fault: Exception | None = None

    def run(self) -> None:
        try:
            with BulkClient(self._where) as self._door:
                self._feed()
        except Exception as fault:
            self.fault = fault

    def _feed(self) -> None:
        batch = 0
        while not self.ending.wait(POLL_SECONDS):
            if self.fed - min(finished(self._door).values()) > MAX_AHEAD:
                continue
            numbers = [b"%d" % nth for nth in range(self.fed, self.fed + BATCH_SIZE)]
            table = pa.table({"value": numbers, "key": [b"%d" % (int(one) % 7) for one in numbers]})
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            until = time.monotonic() + self._where.retry_seconds
            while True:
                try:
                    stage = self._door.stage("feeder", batch, SOURCE, bytes(sink.getvalue()))
                    self._door.commit("feeder", batch, [stage], BATCH_SIZE)
                    break
                except Refused as refusal:
                    # The broker was killed in between. It is not killed again and again within one batch.
                    if refusal.code != "stale_batch" or time.monotonic() > until:
                        raise
            batch += 1
            self.fed += BATCH_SIZE
