"""Which versions of the snapshot are read; their contents: tests/adversity/crashes."""

from __future__ import annotations

import pytest

from sluice.errors import StoreError
from sluice.queues.log import NoteWriter
from sluice.queues.model import QueueRules
from sluice.queues.recovery import snapshot
from tests.queues.kit import EngineUnderTest


@pytest.mark.parametrize("version", [snapshot.OLDEST_VERSION - 1, snapshot.VERSION + 1])
def test_snapshot_of_a_version_that_no_release_wrote_is_refused(
    engine: EngineUnderTest, version: int
) -> None:
    reader = snapshot.SnapshotReader(engine.engine, lambda name, config: QueueRules(name))
    with pytest.raises(StoreError, match=f"version {version}, and .* versions 8 to") as refused:
        reader.read(NoteWriter(version).to_bytes())
    assert "version of Sluice that wrote it" in refused.value.remedy
