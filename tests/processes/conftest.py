"""The fixture `node`: a node that a test starts with the processes that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.node_of_processes import NodeOfProcesses


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeOfProcesses]:
    made = NodeOfProcesses(tmp_path)
    yield made
    made.stop()
