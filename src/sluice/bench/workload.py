"""What a generator process is told to do: plain values that travel as one line of JSON."""

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
    """The connections of a scenario, or one process' share of them.

    `topic` and `filter` are written with {publisher}, {slot}, {owner}, {key} and {reader}. A publisher writes to
    `slots` things in turn; `keys` of them belong to one owner."""

    run: int
    publishers: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()
    all_publishers: int = 0  # of the scenario: a reader may hear them all
    topic: str = ""
    filter: str = ""
    qos: int = 1
    slots: int = 1
    keys: int = 1
    by_key: bool = False  # the slot is the message's partition-key
    group: str = ""  # readers are consumers of queues, and this is their group
    shared: bool = False  # readers share the messages: what one has, no other gets
    reader_id: str = "bench-{run}-reader-{reader}"
    size: int = 1000
    window: int = 64
    backlog: int = 0
    deliveries_per_message: int = (
        1  # deliveries that a message leads to, at the readers of this process
    )
    rate: float = 0.0  # messages per second, by the clock; 0: as fast as it goes
    messages: int = -1  # of each publisher; -1: until the time is over
    measures_acks: bool = False
    subscribes_late: bool = False  # when the clock starts: what they are to read is there already
    idle: int = 0  # connections that only stand there

    def to_line(self, address: Address) -> str:
        return json.dumps({"work": asdict(self), "address": asdict(address)})


def parse_line(line: str | bytes) -> tuple[Workload, Address]:
    document = json.loads(line)
    fields = document["work"]
    fields["publishers"], fields["readers"] = tuple(fields["publishers"]), tuple(fields["readers"])
    return Workload(**fields), Address(**document["address"])


def split_workload(work: Workload, processes: int) -> list[Workload]:
    """The same work for several processes. A publisher is in the process of its reader, so that each can hold back by
    what it sees itself; what a message leads to elsewhere is not its concern."""
    count = max(1, min(processes, max(len(work.publishers), len(work.readers), work.idle)))
    shares: list[Workload] = []
    for nth in range(count):
        publishers, readers = work.publishers[nth::count], work.readers[nth::count]
        deliveries_per_message = work.deliveries_per_message
        if not work.shared and len(work.publishers) == 1 and work.readers:
            deliveries_per_message = len(
                readers
            )  # one to many: this process sees its own readers' copies
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
