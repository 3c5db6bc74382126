"""Assign partitions to the consumers of a group: a pure function of members and last assignment.

Shares differ by at most one, and a partition moves only if even shares require it.
"""

from __future__ import annotations


def assign_partitions(partition_count: int, consumers: list[int], previous: list[int]) -> list[int]:
    """Return the consumer of each partition, -1 for none.

    `consumers` are distinct numbers in order of preference: if the partitions do not divide evenly,
    the first ones get one more. `previous` is the last result.
    """
    if not consumers:
        return [-1] * partition_count
    base_share, remainder = divmod(partition_count, len(consumers))
    # Consumers with more than the base share keep one more: that moves the fewest partitions.
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
