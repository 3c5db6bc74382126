"""Checks that a wheel is complete, and that it runs without the sources of Sluice.

`check_package.py WHEEL` compares it with the checkout. `check_package.py WHEEL --smoke PYTHON` also
uses the Python of an environment with the wheel to serve, create a queue, publish and consume, in
an empty folder.
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
    """Return the files that are missing from a wheel, and those that do not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    sources = {
        name.removeprefix("src/") for name in listed.stdout.splitlines() if (ROOT / name).exists()
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
    unexpected = inside - sources - shared - native
    faults += [
        f"not part of the package: {name}"
        for name in sorted(unexpected)
        if not name.startswith(f"{info}.dist-info/")
    ]
    return faults


def compiled_modules() -> list[str]:
    """Return the modules that setup.py compiles, below `sluice` and without suffix."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import setup

    return [
        str(Path(name).relative_to(setup.PACKAGE).with_suffix(""))
        for name in setup.compiled_modules()
    ]


def smoke(python: str, pure: bool) -> None:
    """Use a queue from creation to consumption, with the installed package only."""
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
            word for flag in ("--mqtt", "--http", "--grpc") for word in (flag, "127.0.0.1:0")
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
                consumed = run(sluice, "consume", "tasks", "--group", "workers", "--count", "1")
                assert consumed == "resize cat.png\n", consumed
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
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    faults = faults_of(wheel)
    if faults:
        raise SystemExit(f"{wheel.name} is not correct:\n  " + "\n  ".join(faults))
    if arguments.smoke:
        smoke(str(Path(arguments.smoke).absolute()), wheel.name.endswith("-py3-none-any.whl"))
    print(f"{wheel.name}: complete" + (", and it runs" if arguments.smoke else ""))


if __name__ == "__main__":
    main()
