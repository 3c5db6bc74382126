"""The committed code is what scripts/make-grpc makes of queue_admin.proto."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = "sluice/admin/grpc"
FILES = ("queue_admin_pb2.py", "queue_admin_pb2.pyi", "queue_admin_pb2_grpc.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    done = subprocess.run(
        [ROOT / "scripts/make-grpc", folder],
        env={**os.environ, "GRPC_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return folder / FOLDER


def committed(name: str) -> str:
    return (ROOT / "src" / FOLDER / name).read_text("utf-8")


def descriptor_in(text: str) -> str:
    found = re.search(r"AddSerializedFile\((b'.*')\)", text)
    assert found
    return found[1]


def test_the_committed_code_describes_what_the_proto_file_says(made: Path) -> None:
    """Whatever the version of the generator, which is why this looks at the description alone."""
    name = FILES[0]
    assert descriptor_in(committed(name)) == descriptor_in((made / name).read_text("utf-8")), (
        "run scripts/make-grpc"
    )


@pytest.mark.parametrize("name", FILES)
def test_the_committed_code_is_what_the_command_makes(made: Path, name: str) -> None:
    stamp = re.search(r"GRPC_GENERATED_VERSION = '(.*)'", committed(FILES[2]))
    assert stamp
    if stamp[1] != version("grpcio-tools"):
        pytest.skip(f"made by grpcio-tools {stamp[1]}, and here is {version('grpcio-tools')}")
    assert committed(name) == (made / name).read_text("utf-8"), "run scripts/make-grpc"
