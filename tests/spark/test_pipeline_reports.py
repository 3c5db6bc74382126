"""What the reports tell, without Java: windows that are added up, pages, what the commands refuse and say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.cli import app, sparking
from sluice.cli.output import Output


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["pipeline", *words], env={"SLUICE_URL": "http://127.0.0.1:1"})


def test_an_option_that_would_do_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    letters = {"stats": {"is_dead_letters": True}}
    monkeypatch.setattr(sparking.SparkVisit, "check_queue", lambda visit, name: letters)
    table = ["--to", str(tmp_path / "table")]
    for words, said in (
        (["compact", "-q", "a", "--to-queue", "b", "--group", "g"], "--group does nothing with --to-queue"),
        (["archive", "-q", "dlq/a", *table, "-g", "g"], "--group does nothing for dlq/a"),
        (
            [
                "transform",
                "-q",
                "a",
                "--to",
                "b",
                "--checkpoint",
                "c",
                "--watermark",
                "1m",
                "--function",
                "x.py:f",
            ],
            "--watermark does nothing with --function",
        ),
    ):
        ran = command(*words)
        assert ran.exit_code == 2 and said in ran.stderr, ran.stderr


def test_a_dry_run_without_letters_answers_like_one_with_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparking.SparkVisit, "homes", lambda visit, queue: [])
    dry, wet = (command("redrive", "-q", "a", "--json", *more) for more in (["--dry-run"], ["--yes"]))
    assert json.loads(dry.stdout) == {"would_put_back": 0, "letters": []}
    assert json.loads(wet.stdout) == {"put_back": 0, "skipped": 0}


def test_work_is_seen_to_go_on_by_whoever_looks_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Output(as_json=False).working().disable
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert not Output(as_json=False).working().disable
    assert Output(as_json=True).working().disable
