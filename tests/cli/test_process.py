"""The command as a user runs it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sluice
from sluice.cli.serve import build
from tests.support.broker_process import Broker, StartBroker, same_build


def run_sluice(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice", *arguments],
        cwd=cwd,
        env=same_build() | environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_version_shows_which_build_runs(tmp_path: Path) -> None:
    result = run_sluice("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"sluice {sluice.__version__} ({build()})\n")


def test_help_shows_which_flags_need_the_admin_api(tmp_path: Path) -> None:
    result = run_sluice("serve", "--help", cwd=tmp_path, COLUMNS="200", NO_COLOR="1")
    for flag in ("--http", "--grpc"):
        (line,) = (line for line in result.stdout.splitlines() if flag in line)
        assert "admin API" in line


def test_invalid_file_ends_the_start_with_key_and_range_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[mqtt]\nmax_qos = 7\n")
    result = run_sluice("serve", "--config", "bad.toml", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "sluice: the configuration cannot be used:\n"
        "  mqtt.max_qos = 7 (bad.toml): must be from 0 to 2."
        " Correct it, or leave it out for the default, 2\n"
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--mqtt", "1883"], {}, "listen.mqtt = 1883 (--mqtt): '1883' is not HOST:PORT"),
        (
            [],
            {"SLUICE_MQTT__MAX_QOS": "7"},
            "mqtt.max_qos = 7 (SLUICE_MQTT__MAX_QOS): must be from 0 to 2",
        ),
        (["--mqtts", "127.0.0.1:0"], {}, "listen.mqtts and listen.wss need a certificate"),
        (["--config", "none.toml"], {}, "cannot read none.toml"),
        (["--log-level", "loud"], {}, "log.level = loud (--log-level)"),
    ],
)
def test_invalid_flag_or_variable_is_refused_by_name(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], words: str
) -> None:
    result = run_sluice("serve", *arguments, cwd=tmp_path, **environ)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_broker_prints_one_ready_line_with_its_real_ports(broker: Broker) -> None:
    assert broker.version == sluice.__version__
    assert broker.facts["pid"] == str(broker.process.pid)
    assert broker.mqtt.port > 0
    assert broker.ws.port > 0
    assert "wss" not in broker.facts


def test_broker_stops_cleanly_on_sigterm_and_prints_nothing_more(start_broker: StartBroker) -> None:
    broker = start_broker(config="[mqtt]\nmax_qos = 1", flags=["--ws", "off"])
    assert "ws" not in broker.facts
    broker.process.terminate()
    assert broker.process.stdout is not None
    assert broker.process.stdout.read() == b""
    assert broker.process.wait(10) == 0
