"""docs/grpc.md: its program runs and says what the page says, its tables are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from sluice.admin.grpc.gate import CODES, ROLES, word_of
from sluice.errors import SluiceError
from tests.brokers import StartBroker, same_build

PAGE = (Path(__file__).parents[3] / "docs/grpc.md").read_text("utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_program_runs_and_prints_what_the_page_shows(start_broker: StartBroker, tmp_path: Path) -> None:
    [program] = [text for info, text in BLOCKS if info == "python run"]
    [output] = [text for info, text in BLOCKS if info == "text output"]
    broker = start_broker()
    done = subprocess.run(
        [sys.executable, "-c", program.replace("localhost:9090", str(broker.address("grpc")))],
        env=same_build(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_every_call_is_in_the_table_with_its_role() -> None:
    found: dict[str, str] = {}
    for calls, roles in re.findall(r"^\| (`[A-Z][^|]*) \| ([a-z, ]+) \|", PAGE, re.MULTILINE):
        names = re.findall(r"`(\w+)`", calls)
        words = roles.split(", ")
        found |= dict(zip(names, words * len(names) if len(words) == 1 else words, strict=False))
    assert found == {name: role.word for name, (role, _) in ROLES.items()}


def test_every_kind_of_refusal_is_in_the_table_with_its_code() -> None:
    told = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", PAGE, re.MULTILINE))
    silent = {
        "unknown_delivery",
        "responses_full",
        "store_error",
        "sluice_error",
    }  # no call is refused with them
    for kind, code in CODES:
        word = word_of(kind.__new__(kind))
        assert issubclass(kind, SluiceError)
        assert word in silent or f"`{word}`" in told[code.name], word
