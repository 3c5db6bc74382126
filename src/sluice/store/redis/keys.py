"""The names of all keys. KEYS.md describes what each holds and how long it exists.

The keys of one partition share a hash tag, so that a Redis Cluster stores them on one node and
distributes partitions over all nodes. The keys of the whole store have the tag `log`. Where many
stores share a Redis Cluster (the cells of a cluster of brokers), each has its own tag, so that they
are distributed too.
"""

from __future__ import annotations


class RedisKeys:
    def __init__(self, prefix: str, tag: str = "log") -> None:
        self.log: str = f"{prefix}:{{{tag}}}"  # position of the log
        self.fence: str = f"{self.log}:fence"
        self.lease: str = f"{self.log}:lease"
        self.snapshot: str = f"{self.log}:snapshot"
        self.segments: str = f"{self.log}:segments"
        self.queues: str = f"{self.log}:queues"
        self.partitions: str = f"{self.log}:partitions"
        self.losses: str = f"{self.log}:losses"
        self._prefix = prefix

    def segment(self, number: int) -> str:
        return f"{self.log}:segment:{number}"

    def base_key(self, name: str, pid: int) -> str:
        """Return the stream of a partition, which is also the prefix of its other keys.

        It contains the pid because a queue can be deleted and created again under its name:
        leftovers of the first must not be taken for the second's.
        """
        return f"{self._prefix}:{{{name}}}:{pid}"


def partition_name(queue: str, number: int) -> str:
    """Return the text between the braces.

    A brace in the queue's name would end the tag early, or leave it empty.
    """
    return f"{queue.replace('%', '%25').replace('}', '%7D')}:{number}"


def queue_of_partition_name(name: str) -> str:
    """Return the queue of a partition's name."""
    return name.rpartition(":")[0].replace("%7D", "}").replace("%25", "%")


def rewritten_key(base: str) -> str:
    """Hash: messages whose id the stream does not accept."""
    return f"{base}:again"


def counters_key(base: str) -> str:
    return f"{base}:counters"


def retry_schedule_key(base: str, group: str) -> str:
    """Sorted set: scheduled retries of a group by due time."""
    return f"{base}:retry:{group}"


def retry_details_key(base: str, group: str) -> str:
    """Hash: details of each scheduled retry."""
    return f"{base}:retries:{group}"


def fence_key(base: str) -> str:
    return f"{base}:fence"


def entry_id(seq: int) -> str:
    """Return the id of a message in its stream: `<seq>-1`, because 0-0 is not a valid id."""
    return f"{seq}-1"


def entry_sequence(entry: bytes) -> int:
    return int(entry.partition(b"-")[0])


class PartitionKeys:
    """The keys of each partition, which contain the queue's name.

    A name is assigned when a partition first occurs, and stored with the frame that creates it. A
    partition without a known queue uses its number as name.
    """

    def __init__(self, keys: RedisKeys) -> None:
        self._keys = keys
        self._bases: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._unsaved: list[int] = []  # not stored in Redis yet

    def assign_name(self, pid: int, partition: tuple[str, int] | None) -> None:
        """Assign a name; `partition` is queue and partition number, if they are known."""
        self.restore_name(
            pid, str(pid) if partition is None else partition_name(partition[0], partition[1])
        )
        self._unsaved.append(pid)

    def restore_name(self, pid: int, name: str) -> None:
        """Restore a stored name."""
        self._names[pid] = name
        self._bases[pid] = self._keys.base_key(name, pid)

    def take_unsaved(self) -> list[int]:
        """Return, and forget, the partitions whose names the current frame must store."""
        new, self._unsaved = self._unsaved, []
        return new

    def has_name(self, pid: int) -> bool:
        return pid in self._names

    def base_key(self, pid: int) -> str:
        """Return the base of a partition's keys, also if they are deleted."""
        return self._bases.get(pid) or self._keys.base_key(str(pid), pid)

    def partition_name(self, pid: int) -> str:
        return self._names[pid]

    def forget(self, pid: int) -> None:
        self._names.pop(pid, None)
        self._bases.pop(pid, None)

    def all_base_keys(self) -> list[tuple[int, str]]:
        return list(self._bases.items())
