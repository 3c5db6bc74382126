"""The names of all keys, in one place; what each holds and how long it lives: KEYS.md beside this file.

What belongs to one partition carries one hash tag, so that a Redis Cluster keeps it on one node and spreads partitions
over all of them. What belongs to the whole store carries the tag `log`; where many stores share one Redis Cluster (the
cells of a cluster of brokers), each has a tag of its own, so that they spread too.
"""

from __future__ import annotations


class RedisKeys:
    def __init__(self, prefix: str, tag: str = "log") -> None:
        self.log: str = f"{prefix}:{{{tag}}}"  # how far the log has come
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
        """The stream of a partition, and the beginning of its other keys. The pid is part of it because a queue may be
        deleted and made again under its name: what is left of the first must not be taken for the second's."""
        return f"{self._prefix}:{{{name}}}:{pid}"


def partition_name(queue: str, number: int) -> str:
    """What stands between the braces. A brace of the queue's own would end the tag early, or leave it empty."""
    return f"{queue.replace('%', '%25').replace('}', '%7D')}:{number}"


def queue_of_partition_name(name: str) -> str:
    """The queue that a partition's name is of."""
    return name.rpartition(":")[0].replace("%7D", "}").replace("%25", "%")


def rewritten_key(base: str) -> str:
    """Messages whose place in the stream is taken or past."""
    return f"{base}:again"


def counters_key(base: str) -> str:
    return f"{base}:counters"


def retry_schedule_key(base: str, group: str) -> str:
    """Sorted set: deliveries of a group that wait for their retry, by the time when they are due."""
    return f"{base}:retry:{group}"


def retry_details_key(base: str, group: str) -> str:
    """Hash: what is known of each of them."""
    return f"{base}:retries:{group}"


def fence_key(base: str) -> str:
    return f"{base}:fence"


def entry_id(seq: int) -> str:
    """The id of a message in its stream. The second half is 1 because sequences begin at 0, and 0-0 is no id."""
    return f"{seq}-1"


def entry_sequence(entry: bytes) -> int:
    return int(entry.partition(b"-")[0])
