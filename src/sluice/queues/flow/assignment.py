"""Which consumer of a group serves which partition: a pure function of who is there and how it was before.

Shares differ by at most one, and a partition stays where it is unless evenness needs it elsewhere.
"""

from __future__ import annotations


def assign(partitions: int, consumers: list[int], before: list[int]) -> list[int]:
    """For each partition the consumer that serves it, -1 for nobody. `consumers` are distinct numbers in order of
    preference: when the partitions do not divide evenly, the earlier ones get one more. `before` is the last answer."""
    if not consumers:
        return [-1] * partitions
    least, more = divmod(partitions, len(consumers))
    # Whoever has more than the least now is the cheapest to leave with one more.
    had = dict.fromkeys(consumers, 0)
    for consumer in before:
        if consumer in had:
            had[consumer] += 1
    by_need = sorted(consumers, key=lambda consumer: -min(had[consumer], least + 1))
    share = {consumer: least + (1 if nth < more else 0) for nth, consumer in enumerate(by_need)}
    after = [-1] * partitions
    for number, consumer in enumerate(before[:partitions]):
        if share.get(consumer, 0) > 0:
            after[number] = consumer
            share[consumer] -= 1
    takers = [consumer for consumer in consumers for _ in range(share[consumer])]
    takers.reverse()
    for number in range(partitions):
        if after[number] < 0:
            after[number] = takers.pop()
    return after
