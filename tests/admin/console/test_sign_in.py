"""Signing in with a user name and a password, and the first page of an empty broker."""

from __future__ import annotations

import subprocess
from pathlib import Path

from playwright.sync_api import expect

from sluice.access.identity import Role
from sluice.access.users import User, with_password, write_users
from tests.admin.console.conftest import Open
from tests.support.broker_process import StartBroker
from tests.support.external_programs import need_program

PASSWORD = "päss:word with spaces"


def test_user_signs_in_with_name_and_password(
    start_broker: StartBroker, open_console: Open, tmp_path: Path
) -> None:
    file = tmp_path / "users.toml"
    write_users(file, {"ann": with_password(User("ann", "", Role.OPERATOR), PASSWORD)})
    broker = start_broker(f'[auth]\nusers = "{file}"\n', ["--store", "memory"])
    console = open_console(broker)
    console.allow("status of 401")
    page = console.page
    page.goto(console.base)
    dialog = page.get_by_role("dialog", name="Sign in")
    expect(dialog).to_contain_text("requires authentication")
    expect(dialog.get_by_label("User name")).to_be_focused()
    dialog.get_by_label("User name").fill("ann")
    dialog.get_by_label("Password").fill("wrong")
    dialog.get_by_role("button", name="Sign in").click()
    expect(dialog.get_by_label("Password")).to_have_value("")
    expect(dialog.get_by_role("alert")).to_contain_text("credentials")
    dialog.get_by_label("User name").fill("ann")
    dialog.get_by_label("Password").fill(PASSWORD)
    console.screenshot("sign-in-password", whole=False)
    dialog.get_by_role("button", name="Sign in").click()
    console.live()
    expect(page.locator("[data-who]")).to_contain_text("ann (operator)")
    stored = page.evaluate("Object.values(localStorage).join() + document.cookie + location.href")
    assert PASSWORD not in stored and "Basic" not in stored
    # A command to paste names the user, and takes the password from the shell.
    expect(page.locator(".command code").first).to_contain_text('-u ann -P "$SLUICE_PASSWORD"')
    page.reload()
    console.live()


def test_first_page_of_an_empty_broker_has_commands_that_work(
    start_broker: StartBroker, open_console: Open
) -> None:
    need_program("mosquitto_pub")
    broker = start_broker(flags=["--store", "memory"])
    console = open_console(broker)
    page = console.page
    console.open()
    steps = page.get_by_role("region", name="First steps").get_by_role("listitem")
    expect(steps).to_have_count(3)
    console.screenshot("first-run")
    shown = page.locator(".steps .command code")
    expect(shown.nth(2)).to_have_text("sluice user add admin --role admin --file users.toml")
    publish, consume = shown.nth(0).inner_text(), shown.nth(1).inner_text()
    assert "\n" not in publish and f"-p {broker.mqtt.port}" in publish
    subprocess.run(["bash", "-c", publish], check=True, timeout=30)
    expect(page.get_by_role("row", name="tasks")).to_be_visible()
    done = subprocess.run(["bash", "-c", consume], check=True, timeout=30, capture_output=True)
    assert done.stdout == b"resize cat.png\n"
