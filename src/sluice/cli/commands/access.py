"""Users, tokens and access rules: `sluice user ...`, `sluice token ...`, `sluice rules check`.

These commands edit the server's files and do not use its APIs: the first user cannot be created by
a user who has to log in. A running server reloads a changed file. Passwords come from a prompt or
from stdin, never from the command line, which all users of the machine can read.
"""

from __future__ import annotations

import getpass
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sluice.cli.support import (
    BAD,
    EXIT_NOT_FOUND,
    GOOD,
    Column,
    CommandError,
    Json,
    Output,
    exit_on_error,
    similar_names,
    styled,
    table,
    usage_error,
)
from sluice.units import parse_duration

if TYPE_CHECKING:  # loads argon2 and cryptography, which only some commands need
    from sluice.access.api_tokens import ApiToken
    from sluice.access.identity import Role
    from sluice.access.users import User

user = typer.Typer(
    no_args_is_help=True, help="The users of the broker, in the file that auth.users names."
)
token = typer.Typer(
    no_args_is_help=True, help="Tokens for REST, gRPC and console, in the file of auth.tokens."
)
rules = typer.Typer(
    no_args_is_help=True, help="The access rules, in the file that auth.rules names."
)

UserFile = Annotated[Path, typer.Option("--file", metavar="FILE", help="The users file.")]
TokensFile = Annotated[Path, typer.Option("--file", metavar="FILE", help="The tokens file.")]
Name = Annotated[str, typer.Argument(metavar="NAME")]
RoleOption = Annotated[
    str | None,
    typer.Option(metavar="ROLE", help="viewer, operator or admin: for REST, gRPC and console."),
]
PasswordStdin = Annotated[
    bool,
    typer.Option(
        "--password-stdin", help="Read the password from stdin, one line, without asking."
    ),
]
USERS: Final = Path("users.toml")
TOKENS: Final = Path("tokens.toml")


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(user, name="user", rich_help_panel=panel)
    root.add_typer(token, name="token", rich_help_panel=panel)
    root.add_typer(rules, name="rules", rich_help_panel=panel)


def _exit_on_error() -> AbstractContextManager[None]:
    return exit_on_error("the file")


# ---- users


@user.command("add")
def add_user(
    name: Name,
    file: UserFile = USERS,
    role: RoleOption = None,
    password_stdin: PasswordStdin = False,
) -> None:
    """Add a user. Without a role it is for MQTT alone."""
    with _exit_on_error():
        from sluice.access.users import (
            User,
            fault_of_user_name,
            load_users,
            with_password,
            write_users,
        )

        users = load_users(file)
        fault = fault_of_user_name(name)
        if fault:
            raise usage_error(fault, "Choose another name")
        if name in users:
            raise CommandError(
                f"there is a user {name!r} already", f"Use `sluice user passwd {name}`, or `role`"
            )
        made = with_password(User(name, "", _parse_role(role)), _read_password(password_stdin))
        write_users(file, {**users, name: made})
        Output(False).note(f"{name} added to {file}")


@user.command("list")
def list_users(file: UserFile = USERS, json: Json = False) -> None:
    """All users and their roles."""
    with _exit_on_error():
        from sluice.access.users import load_users

        users = load_users(file).values()
        out = Output(json)
        if json:
            out.print_json(
                [
                    {"name": one.name, "role": one.role_label or None, "disabled": one.disabled}
                    for one in users
                ]
            )
        elif not users:
            out.show(f"{file} has no users. Add one with: sluice user add NAME --file {file}")
        else:
            rows = [
                (
                    one.name,
                    one.role_label or "-",
                    styled("disabled", BAD) if one.disabled else styled("active", GOOD),
                )
                for one in users
            ]
            out.show(table([Column("name"), Column("role"), Column("state")], rows))


@user.command("passwd")
def set_password(name: Name, file: UserFile = USERS, password_stdin: PasswordStdin = False) -> None:
    """Set a new password for a user. Connections made with the old one are closed."""
    with _exit_on_error():
        from sluice.access.users import with_password

        found = _find_user(file, name)
        _save_user(file, with_password(found, _read_password(password_stdin)))


@user.command("role")
def set_role(
    name: Name, role: Annotated[str, typer.Argument(metavar="ROLE|none")], file: UserFile = USERS
) -> None:
    """Set the role of a user: viewer, operator, admin or none."""
    with _exit_on_error():
        _save_user(
            file,
            replace(_find_user(file, name), role=None if role == "none" else _parse_role(role)),
        )


@user.command("disable")
def disable(
    name: Name,
    file: UserFile = USERS,
    undo: Annotated[bool, typer.Option("--undo", help="Enable the user again.")] = False,
) -> None:
    """Disable a user without removing it. Its connections are closed."""
    with _exit_on_error():
        _save_user(file, replace(_find_user(file, name), disabled=not undo))


@user.command("remove")
def remove_user(name: Name, file: UserFile = USERS) -> None:
    """Remove a user. Its connections are closed."""
    with _exit_on_error():
        from sluice.access.users import load_users, write_users

        _find_user(file, name)
        write_users(file, {key: one for key, one in load_users(file).items() if key != name})
        Output(False).note(f"{name} removed from {file}")


def _find_user(file: Path, name: str) -> User:
    from sluice.access.users import load_users

    found = load_users(file).get(name)
    if found is None:
        raise CommandError(
            f"there is no user {name!r} in {file}",
            f"See who is: sluice user list --file {file}",
            EXIT_NOT_FOUND,
        )
    return found


def _save_user(file: Path, changed: User) -> None:
    from sluice.access.users import load_users, write_users

    write_users(file, {**load_users(file), changed.name: changed})
    Output(False).note(f"{changed.name} changed in {file}")


def _parse_role(text: str | None, advice: str = "Leave it out for MQTT alone") -> Role | None:
    from sluice.access.identity import Role

    if text is None:
        return None
    try:
        return Role.parse(text)
    except ValueError as fault:
        names = [one.label for one in Role]
        similar = similar_names(text, names)
        hint = f"Did you mean {similar[0]}?" if similar else f"Use {', '.join(names)}."
        raise usage_error(f"the role {fault}", f"{hint} {advice}".strip()) from None


def _read_password(from_stdin: bool) -> str:
    if from_stdin or not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise usage_error(
                "there is no password: stdin is empty",
                "Run the command on a terminal, or give one line: --password-stdin < FILE",
            )
        return line.rstrip("\r\n")
    first = getpass.getpass("Password: ")
    if getpass.getpass("The same again: ") != first:
        raise CommandError("these are two different passwords", "Try again")
    return first


# ---- tokens


@token.command("add")
def add_token(
    name: Name,
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, operator or admin.")],
    file: TokensFile = TOKENS,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="How long it is valid, such as 90d; forever unless given."
        ),
    ] = None,
) -> None:
    """Create a token and show it once: only its hash is stored."""
    with _exit_on_error():
        from sluice.access.api_tokens import load_tokens, make_token, write_tokens

        tokens = {one.name: one for one in load_tokens(file).values()}
        if name in tokens:
            raise CommandError(
                f"there is a token {name!r} already", f"Remove it first: sluice token remove {name}"
            )
        wanted = _parse_role(role, advice="")
        assert wanted is not None
        made, text = make_token(name, wanted, _expiry_time(expires))
        write_tokens(file, {**tokens, name: made})
        print(text)
        Output(False).note(f"Added to {file}. Keep the token now: it is not shown again.")


@token.command("list")
def list_tokens(file: TokensFile = TOKENS, json: Json = False) -> None:
    """List all tokens by name; their values are not stored."""
    with _exit_on_error():
        from sluice.access.api_tokens import load_tokens

        tokens = list(load_tokens(file).values())
        out = Output(json)
        if json:
            out.print_json(
                [
                    {"name": one.name, "role": one.role.label, "expires": _expiry_text(one) or None}
                    for one in tokens
                ]
            )
        elif not tokens:
            out.show(
                f"{file} has no tokens. Add one with:"
                f" sluice token add NAME --role viewer --file {file}"
            )
        else:
            rows = [
                (one.name, one.role.label, _expiry_text(one) or "never", _state(one))
                for one in tokens
            ]
            out.show(
                table([Column("name"), Column("role"), Column("expires"), Column("state")], rows)
            )


@token.command("remove")
def remove_token(name: Name, file: TokensFile = TOKENS) -> None:
    """Remove a token. It becomes invalid within a second."""
    with _exit_on_error():
        from sluice.access.api_tokens import load_tokens, write_tokens

        tokens = {one.name: one for one in load_tokens(file).values()}
        if name not in tokens:
            raise CommandError(
                f"there is no token {name!r} in {file}",
                f"See which: sluice token list --file {file}",
                EXIT_NOT_FOUND,
            )
        del tokens[name]
        write_tokens(file, tokens)
        Output(False).note(f"{name} removed from {file}")


def _expiry_time(expires: str | None) -> datetime | None:
    if expires is None:
        return None
    try:
        return datetime.now(UTC) + timedelta(seconds=parse_duration(expires))
    except (ValueError, OverflowError) as fault:
        raise usage_error(f"--expires {fault}", "Write it as 12h or 90d") from None


def _expiry_text(one: ApiToken) -> str:
    return (
        one.expires.astimezone(UTC).isoformat(timespec="seconds") if one.expires is not None else ""
    )


def _state(one: ApiToken) -> str:
    return "valid" if one.is_valid_at(datetime.now(UTC).timestamp()) else "expired"


# ---- rules


@rules.command("check")
def check_rules(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    action: Annotated[
        str | None, typer.Argument(metavar="ACTION", help="publish, subscribe, queue-consume...")
    ] = None,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="A topic, filter or queue.")
    ] = None,
    name: Annotated[str, typer.Option("--user", metavar="NAME", help="No user unless given.")] = "",
    client: Annotated[str, typer.Option("--client", metavar="ID")] = "client",
    json: Json = False,
) -> None:
    """Check a rules file; with an action, show which rule decides it. Exit code 0: allowed, 1: not
    allowed.
    """
    with _exit_on_error():
        from sluice.access.acl_file import read_rules

        try:
            found = read_rules(file.read_text("utf-8"))
        except ValueError as fault:
            raise CommandError(
                f"{file}: {fault}", "A server keeps the rules it has, or does not start with these"
            ) from None
        out = Output(json)
        if action is None:
            if json:
                out.print_json({"rules": len(found)})
            else:
                out.show(f"{file} can be used: {len(found)} rules")
            return
        from sluice.access.explanation import explain_access

        allowed, why = explain_access(found, action, topic or "", name, client)
        if json:
            out.print_json({"allowed": allowed, "why": why})
        else:
            out.show(
                styled(
                    f"{'allowed' if allowed else 'not allowed'}: {why}", GOOD if allowed else BAD
                )
            )
        if not allowed:
            raise typer.Exit(1)
