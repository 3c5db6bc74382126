"""Judges a wheel: whether all of it is there, and whether it runs where nothing else of Sluice is.

`check_package.py WHEEL` compares it with the checkout. `check_package.py WHEEL --smoke PYTHON` then asks the Python of
an environment in which it is installed to serve, to create a queue, to publish and to consume, in an empty folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ("sluice.service", "sluice.toml", "sluice.json")
NATIVE = ".so"


def faults_of(wheel: Path) -> list[str]:
    """What is missing from a wheel, and what has no business in it."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    told = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    sources = {
        name.removeprefix("src/") for name in told.stdout.splitlines() if (ROOT / name).exists()
    }
    info = re.sub(r"-[^-]+-[^-]+-[^-]+\.whl$", "", wheel.name)  # name and version
    shared = {f"{info}.data/data/share/sluice/{name}" for name in SHARED}
    faults = [f"missing: {name}" for name in sorted((sources | shared) - inside)]
    native = {name for name in inside if name.endswith(NATIVE)}
    pure = wheel.name.endswith("-py3-none-any.whl")
    expected = set() if pure else {f"sluice/{name}" for name in compiled_modules()}
    stems = {
        name.split(".", 1)[0]
        for name in native
        if not name.partition("/")[0].startswith("sluice__mypyc")
    }
    faults += [f"not compiled: {name}.py" for name in sorted(expected - stems)]
    faults += [f"compiled and should not be: {name}" for name in sorted(stems - expected)]
    strangers = inside - sources - shared - native
    faults += [
        f"not of the package: {name}"
        for name in sorted(strangers)
        if not name.startswith(f"{info}.dist-info/")
    ]
    return faults


def compiled_modules() -> list[str]:
    """Below `sluice`, without their suffix: what setup.py compiles."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import setup

    return [
        str(Path(name).relative_to(setup.PACKAGE).with_suffix(""))
        for name in setup.compiled_modules()
    ]


def smoke(python: str, pure: bool) -> None:
    """A queue from the first command to the last, with what is installed and nothing else."""
    sluice = str(Path(python).with_name("sluice"))
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLUICE_", "PYTHON"))
    }
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> str:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
            return done.stdout

        build = run(sluice, "--version")
        assert ("(interpreted)" if pure else "(compiled)") in build, build
        listeners = [
            word for door in ("--mqtt", "--http", "--grpc") for word in (door, "127.0.0.1:0")
        ]
        with subprocess.Popen(
            [sluice, "serve", "--data", "data", "--log-level", "warning", *listeners],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        ) as broker:
            try:
                assert broker.stdout is not None
                facts = dict(
                    word.split("=", 1) for word in broker.stdout.readline().split() if "=" in word
                )
                environ |= {"SLUICE_URL": f"http://{facts['http']}", "SLUICE_MQTT": facts["mqtt"]}
                run(sluice, "queue", "create", "tasks")
                run(sluice, "publish", "tasks", "resize cat.png")
                said = run(sluice, "consume", "tasks", "--group", "workers", "--count", "1")
                assert said == "resize cat.png\n", said
                run(sluice, "verify")
                for page in ("/", "/docs", "/healthz", "/readyz", "/metrics"):
                    with urllib.request.urlopen(
                        f"http://{facts['http']}{page}", timeout=30
                    ) as answer:
                        assert answer.status == 200 and answer.read(), page
            finally:
                broker.terminate()
        assert broker.returncode == 0, broker.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--smoke", metavar="PYTHON", help="the Python of an environment that has the wheel"
    )
    told = parser.parse_args()
    wheel = told.wheel.resolve()
    faults = faults_of(wheel)
    if faults:
        raise SystemExit(f"{wheel.name} is not as it should be:\n  " + "\n  ".join(faults))
    if told.smoke:
        smoke(str(Path(told.smoke).absolute()), wheel.name.endswith("-py3-none-any.whl"))
    print(f"{wheel.name}: all there" + (", and it runs" if told.smoke else ""))


if __name__ == "__main__":
    main()
