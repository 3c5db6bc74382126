"""Taking over a store that lies in a Cluster: no earlier owner may write any more, and what it left half done goes.

A frame is there when the log says so. Bodies come before the log, so a crash between the two leaves entries above what
the log knows. They are removed before the first new frame: its messages get the same sequences, and must not be taken
for ones that are there already.
"""

from __future__ import annotations

from sluice.store.protocol import Recovery
from sluice.store.redis.log.address_index import Index
from sluice.store.redis.keys import Keys, entry_id
from sluice.store.redis.connection import Command, Link, Word
from sluice.store.redis.partition_keys import Places
from sluice.store.redis.log.write_plan import MOST_WORDS, Steps, stamp, write_part

_AT_ONCE = 256  # partitions asked in one go
FIRST_TURN = 1_000_000  # of the writer: what is done here has turns below


def raise_fences(link: Link, keys: Keys, token: int) -> None:
    """In every partition, before anything is read of it."""
    names = link.ask([(keys.log, ["HGETALL", keys.partitions])])[0]
    bases = [keys.base(bytes(name).decode(), int(pid)) for pid, name in zip(names[::2], names[1::2])]
    for start in range(0, len(bases), _AT_ONCE):
        some = bases[start : start + _AT_ONCE]
        link.ask([(base, write_part(base, Steps(), token, stamp(token, 0))) for base in some])


def remove_torn(link: Link, places: Places, index: Index, token: int, report: Recovery) -> None:
    """What lies above the log. The stream takes ids from there on again."""
    known = places.all()
    for start in range(0, len(known), _AT_ONCE):
        some = known[start : start + _AT_ONCE]
        looks: list[tuple[str, Command]] = [
            (base, ["XRANGE", base, f"{index.top(pid) + 1}-0", "+"]) for pid, base in some
        ]
        for (pid, base), entries in zip(some, link.ask(looks)):
            if entries:
                report.torn_bytes += sum(len(fields[1]) for _, fields in entries)
                _remove(link, base, [bytes(entry) for entry, _ in entries], index.top(pid), token)


def _remove(link: Link, base: str, entries: list[Word], top: int, token: int) -> None:
    for turn, start in enumerate(range(0, len(entries), MOST_WORDS), 1):
        steps = Steps()
        steps.command("XDEL", base, *entries[start : start + MOST_WORDS])
        steps.try_command(base, "XSETID", base, entry_id(top) if top >= 0 else "0-0")
        link.ask([(base, write_part(base, steps, token, stamp(token, turn)))])
