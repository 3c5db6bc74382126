"""Pages of the documentation as tests read them: fenced blocks, the commands and programs among them, and a shell to
run these in. What a fence is called says what is done with it:

    sh run          run by bash; what it says is the `text output` block behind it, `...` stands for anything
    python run      likewise, by Python; `localhost` is where the test's broker listens
    python file=X   written to the page's folder under this name, for the commands behind it; also toml, json
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.brokers import Broker, same_build

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "fuzz/*.md")
    for page in ROOT.glob(pattern)
)
CLI = Path(__file__).with_name("quick_cli.py")
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\w+ file=(\S+)")


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: info string and text."""
    return [(found["info"], found["text"]) for found in FENCE.finditer((ROOT / page).read_text("utf-8"))]


def commands(page: str) -> list[tuple[str, str]]:
    """Each `sh run` block, and what the `text output` block behind it says."""
    return [(text, output) for info, text, output in steps(page) if info == "sh run"]


def steps(page: str) -> list[tuple[str, str, str]]:
    """Each block that something is done with: info string, text, and the output behind it."""
    return [
        (info, text, next_text if next_info == "text output" else "")
        for (info, text), (next_info, next_text) in pairwise([*blocks(page), ("", "")])
        if info.endswith(" run") or FILE.fullmatch(info)
    ]


def check(script: str, output: str, folder: Path, environ: dict[str, str]) -> None:
    """Run a script and compare all it says, line by line; `...` in the page stands for anything."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=55,
    )
    # "Timed out" is mosquitto_sub at the end of the time that -W gives it.
    said = [line for line in done.stdout.splitlines() if line.rstrip() not in ("Timed out", "")]
    wanted = [line for line in output.splitlines() if line]
    assert len(said) == len(wanted), done.stdout
    for line, pattern in zip(said, wanted, strict=True):
        words = re.escape(narrow(pattern)).replace(re.escape("..."), ".*")
        assert re.fullmatch(words, narrow(line)), f"{line!r} is not {pattern!r}"


def narrow(line: str) -> str:
    """A line of a table whose columns are as wide as they were on another day."""
    return re.sub(r" {2,}", "  ", line.rstrip())


class QuickCli:
    """A process that forks commands: see quick_cli.py. `serve` and `worker`, sent signals, are started as ever."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "cli"
        self._process = subprocess.Popen(
            [sys.executable, str(CLI), str(self._socket)], env=same_build(), stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def script(self) -> str:
        python = f'exec "{sys.executable}"'
        return (
            f'case $1 in serve | worker) {python} -m sluice "$@" ;; esac\n'
            f'{python} -I -S "{CLI}" "{self._socket}" "$@"'
        )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Shell:
    """A folder and an environment in which `sluice`, `python` and the mosquitto clients are those of the test, and
    speak to its broker."""

    def __init__(self, folder: Path, broker: Broker, quick: QuickCli) -> None:
        self.folder = folder
        self._mqtt = str(broker.mqtt)
        tools = folder / ".bin"
        tools.mkdir()
        for name, words in (("sluice", quick.script()), ("python", f'exec "{sys.executable}" "$@"')):
            tool = tools / name
            tool.write_text(f"#!/bin/sh\n{words}\n")
            tool.chmod(0o755)
        settings = folder / ".config"
        settings.mkdir()
        for name in ("mosquitto_pub", "mosquitto_sub", "mosquitto_rr"):
            (settings / name).write_text(f"-h {broker.mqtt.host}\n-p {broker.mqtt.port}\n")
        (folder / "examples").symlink_to(ROOT / "examples")
        self.environ = {
            **same_build(),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(settings),
            "SLUICE_MQTT": self._mqtt,
            "SLUICE_URL": f"http://{broker.address('http')}",
        }

    def do(self, info: str, text: str, output: str) -> None:
        """Take one step of a page."""
        if file := FILE.fullmatch(info):
            (self.folder / file[1]).write_text(text)
        elif info == "sh run":
            check(text, output, self.folder, self.environ)
        else:
            program = self.folder / ".program.py"
            program.write_text(text.replace("localhost", self._mqtt))
            check("python .program.py", output, self.folder, self.environ)
