"""Tests of the release files: the sdist, the wheel built from it, and the container file.

`scripts/package` tests more: it compiles, installs into a fresh environment and runs the result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.broker_process import same_build

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "packaging/Containerfile"

MAKE = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)


def make(what: str, source: Path, into: Path) -> Path:
    """Run a hook of the build backend without compilation and return the file that it writes."""
    into.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MAKE, what, str(into)],
        cwd=source,
        env={**os.environ, "SLUICE_PURE": "1", "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    [made] = into.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from a copy of the files in git, because a build leaves files behind."""
    folder = tmp_path_factory.mktemp("sdist")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if name.startswith(("tests/", "bench/")) or not (ROOT / name).is_file():
            continue
        copy = folder / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    return make("build_sdist", folder / "tree", folder / "dist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [unpacked] = folder.iterdir()
    return make("build_wheel", unpacked, folder / "dist")


def test_wheel_made_from_the_sdist_has_exactly_the_files_of_the_package(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    judged = subprocess.run(
        [sys.executable, "scripts/check_package.py", str(wheel)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (judged.returncode, judged.stderr) == (0, "")


def test_wheel_check_detects_missing_files(wheel: Path, tmp_path: Path) -> None:
    poor = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(poor, "w") as less:
        for name in whole.namelist():
            if not name.endswith(("console/index.html", "py.typed")):
                less.writestr(name, whole.read(name))
    judged = subprocess.run(
        [sys.executable, "scripts/check_package.py", str(poor)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert judged.returncode == 1
    assert "missing: sluice/admin/console/index.html" in judged.stderr
    assert "missing: sluice/py.typed" in judged.stderr


def test_sdist_contains_the_pages_and_runtime_files(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "CHANGELOG.md",
        "docs/queues.md",
        "packaging/sluice.service",
        "packaging/Containerfile",
    ):
        assert name in names
    assert not any(name.startswith(("tests", "bench")) for name in names)


# ---- the container file, which is only read here


def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the container file with its argument, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", CONTAINER.read_text("utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines) if word
    ]


def last_stage() -> dict[str, str]:
    """Return the instructions of the last stage, the image itself; of each kind the last one."""
    found = instructions()
    start = max(place for place, (word, _) in enumerate(found) if word == "FROM")
    return dict(found[start:])


def test_image_is_built_in_one_stage_and_runs_in_another_without_a_compiler() -> None:
    bases = [rest for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+( AS \w+)?", base) for base in bases)
    assert last_stage()["COPY"] == "--from=build /opt/sluice /opt/sluice"
    assert "gcc" not in last_stage()["RUN"]


def test_image_is_not_root_stores_data_outside_and_reports_health() -> None:
    image = last_stage()
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", image["USER"])
    assert json.loads(image["ENTRYPOINT"])[-1].startswith(image["VOLUME"])
    assert "http://127.0.0.1:8080/healthz" in image["HEALTHCHECK"]
    assert "0.0.0.0:8080" in json.loads(image["CMD"])


def test_image_is_built_from_existing_files_that_are_not_ignored() -> None:
    stored = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for name in rest.split()[:-1]:
                assert (ROOT / name).exists() and name in stored, name


def test_image_without_users_refuses_to_start_and_says_how_to_add_one(tmp_path: Path) -> None:
    image = last_stage()
    command = json.loads(image["ENTRYPOINT"])[1:] + json.loads(image["CMD"])
    done = subprocess.run(
        [sys.executable, "-m", "sluice", *command],
        cwd=tmp_path,
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "sluice user add NAME" in done.stderr
