"""Which consumer of a group serves which partition: a pure function of who is there and how it was before.

Shares differ by at most one, and a partition stays where it is unless evenness needs it elsewhere.
"""

from __future__ import annotations


def assign_partitions(partition_count: int, consumers: list[int], previous: list[int]) -> list[int]:
    """For each partition the consumer that serves it, -1 for nobody. `consumers` are distinct numbers in order of
    preference: when the partitions do not divide evenly, the earlier ones get one more. `before` is the last answer."""
    if not consumers:
        return [-1] * partition_count
    base_share, remainder = divmod(partition_count, len(consumers))
    # Whoever has more than the least now is the cheapest to leave with one more.
    held = dict.fromkeys(consumers, 0)
    for consumer in previous:
        if consumer in held:
            held[consumer] += 1
    by_held = sorted(consumers, key=lambda consumer: -min(held[consumer], base_share + 1))
    share = {
        consumer: base_share + (1 if nth < remainder else 0) for nth, consumer in enumerate(by_held)
    }
    assigned = [-1] * partition_count
    for number, consumer in enumerate(previous[:partition_count]):
        if share.get(consumer, 0) > 0:
            assigned[number] = consumer
            share[consumer] -= 1
    open_slots = [consumer for consumer in consumers for _ in range(share[consumer])]
    open_slots.reverse()
    for number in range(partition_count):
        if assigned[number] < 0:
            assigned[number] = open_slots.pop()
    return assigned
