"""The compiled build and the interpreted sources give the same results for the same bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.wire import corpus

SEED, COUNT = 5, 8000


@pytest.mark.skipif(
    not corpus.COMPILED, reason="the wire code runs interpreted here: there is nothing to compare"
)
def test_compiled_build_agrees_with_the_interpreted_sources_on_a_corpus() -> None:
    done = subprocess.run(
        [sys.executable, corpus.__file__, str(SEED), str(COUNT)],
        capture_output=True,
        check=False,
        encoding="utf-8",
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    interpreted = done.stdout.splitlines()
    compiled = corpus.outcomes_of(SEED, COUNT)
    assert len(interpreted) == len(compiled)
    cases = list(corpus.corpus(SEED, COUNT))
    for (version, data), ours, theirs in zip(cases, compiled, interpreted):
        assert ours == theirs, f"version {version}, bytes {data.hex()}"


def test_corpus_covers_enough_cases() -> None:
    """It must contain packets of every type and cause most errors; else agreement means little."""
    outcomes = corpus.outcomes_of(SEED, COUNT)
    for name in (
        *("Connect", "Connack", "Publish", "Ack", "Subscribe", "Suback"),
        *("Unsubscribe", "Unsuback", "Pingreq", "Pingresp", "Disconnect", "Auth"),
    ):
        assert sum(f"'packet': '{name}'" in line for line in outcomes) >= 20, name
    for reason in (" 0x81 ", " 0x82 ", " 0x84 ", " 0x90 ", " 0x94 ", " 0x95 "):
        assert sum(reason in line for line in outcomes) >= 1, reason
