"""The committed code is what scripts/make-grpc makes of the .proto files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROTOS = ("sluice/admin/grpc/queue_admin", "sluice/cluster/etcd/etcd")
FILES = [f"{proto}{end}" for proto in PROTOS for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")]


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
    return folder


def committed(name: str) -> str:
    return (ROOT / "src" / name).read_text("utf-8")


def descriptor_in(text: str) -> str:
    found = re.search(r"AddSerializedFile\((b'.*')\)", text)
    assert found
    return found[1]


@pytest.mark.parametrize("proto", PROTOS)
def test_committed_code_matches_the_proto_file(made: Path, proto: str) -> None:
    """Whatever the version of the generator, which is why this looks at the description alone."""
    name = f"{proto}_pb2.py"
    assert descriptor_in(committed(name)) == descriptor_in((made / name).read_text("utf-8")), (
        "run scripts/make-grpc"
    )


@pytest.mark.parametrize("name", FILES)
def test_committed_code_matches_output_of_make_grpc(made: Path, name: str) -> None:
    stamp = re.search(r"GRPC_GENERATED_VERSION = '(.*)'", committed(f"{PROTOS[0]}_pb2_grpc.py"))
    assert stamp
    if stamp[1] != version("grpcio-tools"):
        pytest.skip(f"made by grpcio-tools {stamp[1]}, and here is {version('grpcio-tools')}")
    assert committed(name) == (made / name).read_text("utf-8"), "run scripts/make-grpc"
