"""The entries that the supervisor keeps for its processes."""

from __future__ import annotations

from sluice.processes.shared_entries import SharedEntries


def test_entries_of_a_process_and_the_claims_of_its_nodes_end_with_it() -> None:
    entries = SharedEntries()
    one, two = entries.grant(1), entries.grant(2)
    assert entries.put("nodes/a", "first", one) and entries.put("nodes/b", "second", two)
    assert entries.swap("claims/0", None, "a", "nodes/a") == "a"
    assert entries.swap("claims/1", None, "b", "nodes/b") == "b"
    entries.swap("secret", None, "s", "")
    entries.take_changes()
    entries.end_process(1)
    assert sorted(entries.take_changes()) == [("claims/0", None), ("nodes/a", None)]
    assert entries.entries == {"nodes/b": "second", "claims/1": "b", "secret": "s"}
    assert not entries.is_alive(one) and entries.is_alive(two)


def test_ended_lease_writes_nothing_more_and_its_claims_stay() -> None:
    entries = SharedEntries()
    lease = entries.grant(1)
    entries.put("nodes/a", "first", lease)
    entries.swap("claims/0", None, "a", "nodes/a")
    entries.end_lease(lease)
    assert entries.entries == {"claims/0": "a"}
    assert not entries.put("nodes/a", "again", lease)
    assert entries.swap("claims/1", None, "a", "nodes/a") is None


def test_swap_replaces_only_the_expected_value_and_returns_the_value_afterwards() -> None:
    entries = SharedEntries()
    assert entries.swap("cells", None, "4", "") == "4"
    assert entries.swap("cells", None, "8", "") == "4"
    assert entries.swap("cells", "4", None, "") is None
    assert entries.take_changes() == [("cells", "4"), ("cells", None)]


def test_process_of_an_entry_is_known_until_its_lease_ends() -> None:
    entries = SharedEntries()
    lease = entries.grant(2)
    entries.put("nodes/b", "second", lease)
    assert entries.process_of("nodes/b") == 2
    entries.end_lease(lease)
    assert entries.process_of("nodes/b") is None
