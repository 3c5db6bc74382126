"""The work of a generator process: plain values, sent as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Workload:
    """The connections of a scenario, or one process's share of them.

    `topic` and `filter` contain {publisher}, {slot}, {owner}, {key} and {reader}. A publisher
    rotates among `slots`; `keys` of them belong to one owner.
    """

    run: int
    publishers: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()
    all_publishers: int = 0  # of the scenario: a reader may receive from all of them
    topic: str = ""
    filter: str = ""
    qos: int = 1
    slots: int = 1
    keys: int = 1
    by_key: bool = False  # the slot is the partition key
    group: str = ""  # of the readers, which are consumers of queues
    shared: bool = False  # readers share the messages: each goes to one of them
    reader_id: str = "bench-{run}-reader-{reader}"
    size: int = 1000
    window: int = 64
    backlog: int = 0
    # At the readers of this process.
    deliveries_per_message: int = 1
    rate: float = 0.0  # messages per second; 0: as fast as possible
    messages: int = -1  # of each publisher; -1: until the time is over
    measures_acks: bool = False
    # at the start of the measurement: the messages are in the queue already
    subscribes_late: bool = False
    idle: int = 0  # idle connections

    def to_line(self, address: Address) -> str:
        return json.dumps({"work": asdict(self), "address": asdict(address)})


def parse_line(line: str | bytes) -> tuple[Workload, Address]:
    document = json.loads(line)
    fields = document["work"]
    fields["publishers"], fields["readers"] = tuple(fields["publishers"]), tuple(fields["readers"])
    return Workload(**fields), Address(**document["address"])


def split_workload(work: Workload, processes: int) -> list[Workload]:
    """Split the work among processes.

    A publisher is in the process of its reader, so that each process can throttle by its own
    deliveries.
    """
    count = max(1, min(processes, max(len(work.publishers), len(work.readers), work.idle)))
    shares: list[Workload] = []
    for nth in range(count):
        publishers, readers = work.publishers[nth::count], work.readers[nth::count]
        deliveries_per_message = work.deliveries_per_message
        if not work.shared and len(work.publishers) == 1 and work.readers:
            # One to many: this process sees the deliveries to its own readers.
            deliveries_per_message = len(readers)
        shares.append(
            replace(
                work,
                publishers=publishers,
                readers=readers,
                deliveries_per_message=deliveries_per_message,
                rate=work.rate * len(publishers) / max(1, len(work.publishers)),
                idle=work.idle // count + (nth < work.idle % count),
            )
        )
    return shares
