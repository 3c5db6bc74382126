"""Runs the commands and programs in the fenced blocks of documentation pages.

The info string of a block decides what the tests do with it:

    sh run          run by bash; the output must match the following `text output` block, in which
                    `...` matches anything, and as the first line all lines before. Without such a
                    block any output is fine, and every command must succeed
    python run      the same, run by Python
    python file=X   written to the page's folder under this name; also toml, json
    sh, python      do not occur: everything that a reader can copy is run

Addresses are replaced by those of the test's broker, and system directories by directories in the
page's folder. Interactive and endless commands get a simulated user (terminal_user.py). Programs
that a test cannot use are replaced by stubs (program_stubs.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.support.broker_process import Broker, same_build

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "fuzz/*.md", "src/sluice/**/*.md")
    for page in ROOT.glob(pattern)
)
CLI = Path(__file__).with_name("quick_cli.py")
TERMINAL_USER = Path(__file__).with_name("terminal_user.py")
PROGRAM_STUBS = Path(__file__).with_name("program_stubs.py")
PEERS = Path(__file__).parents[1] / "peers"
STUBBED_PROGRAMS = ("apt-get", "docker", "journalctl", "pip", "python3.11", "systemctl")
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"\w+ file=(\S+)")


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a page: info string and text."""
    return [
        (found["info"], found["text"]) for found in FENCE.finditer((ROOT / page).read_text("utf-8"))
    ]


def commands(page: str) -> list[tuple[str, str]]:
    """Return each `sh run` block with its expected output."""
    return [(text, output) for info, text, output in steps(page) if info == "sh run"]


def steps(page: str) -> list[tuple[str, str, str]]:
    """Return each block that is run or written: info string, text, and expected output."""
    return [
        (info, text, next_text if next_info == "text output" else "")
        for (info, text), (next_info, next_text) in pairwise([*blocks(page), ("", "")])
        if info.endswith(" run") or FILE.fullmatch(info)
    ]


def check(script: str, output: str, folder: Path, environ: dict[str, str]) -> None:
    """Run a script and compare its output line by line; `...` in the page matches anything.

    If the page shows no output, every command of it must succeed.
    """
    done = subprocess.run(
        ["bash", "-c", script] if output else ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=55,
    )
    if not output:
        assert done.returncode == 0, f"exit code {done.returncode}\n{script}\n{done.stdout}"
        return
    # mosquitto_sub prints "Timed out" at the end of the time given by -W.
    printed = [
        shorten(line) for line in done.stdout.splitlines() if line.rstrip() not in ("Timed out", "")
    ]
    wanted = [line for line in output.splitlines() if line]
    if wanted[0] == "...":  # any lines before the rest
        printed = ["...", *printed[len(printed) - len(wanted) + 1 :]]
    assert len(printed) == len(wanted), done.stdout
    for line, pattern in zip(printed, wanted, strict=True):
        words = re.escape(shorten(pattern)).replace(re.escape("..."), ".*")
        assert re.fullmatch(words, line), f"{line!r} is not {pattern!r}\n{done.stdout}"


def shorten(line: str) -> str:
    """Return a line with single separators: widths of table columns vary."""
    return re.sub(r" {2,}", "  ", line.rstrip())


def stub_command(words: list[str]) -> None:
    """Let the stub of a program check its arguments in a page."""
    environ = {**os.environ, "STUB_PATH": "/usr/bin/" + words[0]}
    done = subprocess.run(
        [sys.executable, str(PROGRAM_STUBS), *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


class QuickCli:
    """A process that forks commands: see quick_cli.py. `serve` and `worker` start normally."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "cli"
        self._process = subprocess.Popen(
            [sys.executable, str(CLI), str(self._socket)], env=same_build(), stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def script(self) -> str:
        """Return the script `sluice`. If PERSON is set, a simulated user answers and stops it."""
        real = f'"{sys.executable}" -m sluice "$@"'
        person = f'exec "{sys.executable}" -I -S "{TERMINAL_USER}"'
        return f"""case "$PERSON $*" in
yes\\ serve*) {person} --ends 1 {real} ;;
yes\\ worker*) {person} --ends 2 {real} ;;
yes\\ top | yes\\ *--follow*) {person} --ends 1 {real} ;;
*--yes* | *--dry-run*) ;;
yes\\ user\\ [ap]* | yes\\ *delete* | yes\\ *purge* | yes\\ dlq\\ retry*) {person} {real} ;;
\\ serve* | \\ worker*) exec {real} ;;
esac
exec "{sys.executable}" -I -S "{CLI}" "{self._socket}" "$@"
"""

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Shell:
    """A folder and an environment whose `sluice`, `python` and mosquitto use the test's broker."""

    def __init__(self, folder: Path, broker: Broker, quick: QuickCli) -> None:
        self.folder = folder
        self.root = folder / "root"
        self._tools = folder / ".venv" / "bin"
        self._tools.mkdir(parents=True)
        self.add("sluice", quick.script())
        self.add("python", f'exec "{sys.executable}" "$@"')
        for name in STUBBED_PROGRAMS:
            self.add(name, self._add_stub(name))
        self._copy_scripts()
        for place in ("etc/systemd/system", "opt", "var/lib"):
            (self.root / place).mkdir(parents=True)
        settings = folder / ".config"
        settings.mkdir()
        for name in ("mosquitto_pub", "mosquitto_sub", "mosquitto_rr"):
            (settings / name).write_text(f"-h {broker.mqtt.host}\n-p {broker.mqtt.port}\n")
        for name in ("examples", "tests"):
            (folder / name).symlink_to(ROOT / name)
        usual = same_build()
        self.environ = {
            **usual,
            # Debian installs servers there
            "PATH": f"{self._tools}:{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": f"{usual['PYTHONPATH']}:{PEERS}",
            "SLUICE_LISTEN__MQTT": "127.0.0.1:0",  # free ports for brokers that the page starts
            "SLUICE_HTTP": "127.0.0.1:0",
            "SLUICE_GRPC": "127.0.0.1:0",
            "XDG_CONFIG_HOME": str(settings),
            "PAGE_ROOT": str(self.root),
            "PERSON": "",
        }
        self.use_broker(broker)

    def use_broker(self, broker: Broker) -> None:
        self._broker = broker
        self.environ["SLUICE_MQTT"] = str(broker.mqtt)
        self.environ["SLUICE_URL"] = f"http://{broker.address('http')}"

    def do(self, info: str, text: str, output: str) -> None:
        """Execute one block of a page."""
        if file := FILE.fullmatch(info):
            (self.folder / file[1]).write_text(self.here(text))
        elif info == "sh run":
            alone = "yes" if not re.search(r"&$", text, re.MULTILINE) else ""
            check(self.here(text), output, self.folder, {**self.environ, "PERSON": alone})
        else:
            program = self.folder / ".program.py"
            program.write_text(
                self.here(text).replace("mqtt://localhost", f"mqtt://{self._broker.mqtt}")
            )
            check("python .program.py", output, self.folder, self.environ)

    def here(self, text: str) -> str:
        """Insert the addresses and directories of this test; started brokers use free ports."""
        serve = re.compile(r"^sluice serve.*$", re.MULTILINE)
        text = serve.sub(
            lambda line: re.sub(r"(?<!/)127\.0\.0\.1:\d+", "127.0.0.1:0", line[0]), text
        )
        text = re.sub(r'"0\.0\.0\.0:\d+"', '"127.0.0.1:0"', text)
        for port, listener in (("8080", "http"), ("1883", "mqtt"), ("9090", "grpc")):
            text = re.sub(
                rf"\b(127\.0\.0\.1|localhost):{port}\b", str(self._broker.address(listener)), text
            )
        mqtt = self._broker.mqtt
        text = text.replace('connect("localhost")', f'connect("{mqtt.host}", {mqtt.port})')
        text = text.replace("--pid 4711", f"--pid {self._broker.process.pid}")
        return re.sub(r"(?<![\w./-])/(etc|opt|var/lib)/", rf"{self.root}/\1/", text)

    def add(self, name: str, words: str) -> None:
        tool = self._tools / name
        tool.write_text(f"#!/bin/bash\n{words}\n")
        tool.chmod(0o755)

    def _add_stub(self, name: str) -> str:
        return f'STUB_PATH=$0 exec "{sys.executable}" "{PROGRAM_STUBS}" {name} "$@"'

    def _copy_scripts(self) -> None:
        """Copy the scripts of the checkout, without their preparation steps."""
        (self.folder / "scripts").mkdir()
        (self.folder / "bench").mkdir()
        for name in ("scripts/serve", "scripts/adversity", "bench/compare"):
            shutil.copy(ROOT / name, self.folder / name)
        (self.folder / "bench/comparison").symlink_to(ROOT / "bench/comparison")
        self.add("package", self._add_stub("package"))
        (self.folder / "scripts" / "package").symlink_to(self._tools / "package")
        (self.folder / "scripts" / "_env").write_text(
            'set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n'
            "VENV=.venv PYTHON_IN_VENV=.venv/bin/python\n"
            "prepare_tools() { :; }\nprepare_sluice() { :; }\n"
        )
