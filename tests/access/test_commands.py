"""`sluice user`, `sluice token` and `sluice rules check`, as typed in a shell."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.access.users import load_users, verify
from sluice.cli.root import app

PASSWORD = "correct horse battery staple"


class Shell:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *words: str, typed: str = "", code: int = 0) -> str:
        done = CliRunner().invoke(app, words, typed, catch_exceptions=False)
        assert done.exit_code == code, done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)


def test_users_are_added_changed_and_removed(shell: Shell) -> None:
    path = shell.folder / "users.toml"
    shell("user", "add", "ann", "--role", "admin", "--password-stdin", typed=f"{PASSWORD}\n")
    shell("user", "add", "bob", typed=f"{PASSWORD}\n")
    assert "already" in shell("user", "add", "ann", typed=f"{PASSWORD}\n", code=1)
    assert "fewer than 8" in shell("user", "add", "cat", typed="short\n", code=2)
    assert "colon" in shell("user", "add", "a:b", typed=f"{PASSWORD}\n", code=2)
    assert "viewer, operator, admin" in shell(
        "user", "add", "cat", "--role", "king", typed=f"{PASSWORD}\n", code=2
    )
    assert json.loads(shell("user", "list", "--json")) == [
        {"name": "ann", "role": "admin", "disabled": False},
        {"name": "bob", "role": None, "disabled": False},
    ]
    shell("user", "role", "ann", "viewer")
    shell("user", "disable", "bob")
    shell("user", "passwd", "ann", typed="another password\n")
    users = load_users(path)
    assert users["ann"].role_label == "viewer" and users["bob"].disabled
    assert verify(users["ann"].hash, b"another password") and not verify(
        users["ann"].hash, PASSWORD.encode()
    )
    shell("user", "disable", "bob", "--undo")
    shell("user", "role", "ann", "none")
    shell("user", "remove", "ann")
    assert "no user" in shell("user", "passwd", "ann", typed=f"{PASSWORD}\n", code=3)
    assert "bob" in shell("user", "list") and "ann" not in shell("user", "list")


def test_password_cannot_be_given_as_argument(shell: Shell) -> None:
    shell("user", "add", "ann", PASSWORD, code=2)
    shell("user", "add", "ann", "--password", PASSWORD, code=2)


def test_token_is_shown_only_once(shell: Shell) -> None:
    text = shell("token", "add", "ci", "--role", "operator", "--expires", "90d").splitlines()[0]
    assert text.startswith("slu_") and text not in (shell.folder / "tokens.toml").read_text()
    (reported,) = json.loads(shell("token", "list", "--json"))
    assert (reported["name"], reported["role"]) == ("ci", "operator") and reported["expires"]
    assert "already" in shell("token", "add", "ci", "--role", "viewer", code=1)
    shell("token", "add", "x", "--role", "viewer", "--expires", "soon", code=2)
    shell("token", "remove", "ci")
    shell("token", "remove", "ci", code=3)


def test_rules_check_shows_which_rule_decides(shell: Shell) -> None:
    (shell.folder / "rules.toml").write_text(
        '[[rule]]\ndeny = "publish"\ntopics = ["a/secret"]\n'
        '[[rule]]\nname = "own"\nallow = ["publish"]\nusers = ["ann"]\ntopics = ["a/#", "c/%c"]\n'
    )
    assert "2 rules" in shell("rules", "check", "rules.toml")
    assert "rule 2 (own)" in shell(
        "rules", "check", "rules.toml", "--user", "ann", "publish", "a/x"
    )
    assert "rule 1" in shell(
        "rules", "check", "rules.toml", "--user", "ann", "publish", "a/secret", code=1
    )
    assert "no rule" in shell(
        "rules", "check", "rules.toml", "--user", "bob", "publish", "a/x", code=1
    )
    found = shell(
        "rules", "check", "rules.toml", "--user", "ann", "--client", "7", "--json", "publish", "c/7"
    )
    assert json.loads(found)["allowed"] is True
    shell("rules", "check", "rules.toml", "fly", "x", code=2)
    (shell.folder / "rules.toml").write_text("[[rule]]\nallow = 'fly'")
    assert "'fly' is no action" in shell("rules", "check", "rules.toml", code=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_changed_by_root_keeps_its_owner(shell: Shell) -> None:
    path = shell.folder / "users.toml"
    shell("user", "add", "ann", "--password-stdin", typed=f"{PASSWORD}\n")
    os.chown(path, 4711, 4712)
    shell("user", "add", "bob", "--password-stdin", typed=f"{PASSWORD}\n")
    now = path.stat()
    assert (now.st_uid, now.st_gid, now.st_mode & 0o777) == (4711, 4712, 0o600)
    assert sorted(load_users(path)) == ["ann", "bob"]
