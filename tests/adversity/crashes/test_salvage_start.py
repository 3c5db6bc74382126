"""Tests of damaged stores: a start is refused, and continues without the lost data on request."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from librt.strings import BytesWriter

from sluice.client.sync import Client
from sluice.store.embedded.frame_format import FRAME_HEADER_BYTES, encode_frame_header
from sluice.store.protocol import NOTE, write_record
from tests.support.broker_process import Broker, StartBroker, same_build


def payloads(broker: Broker) -> list[str]:
    """Return the messages of the queue without consuming them, which would write to the log."""
    url = f"http://{broker.address('http')}/api/v1/queues/tasks/messages"
    with urllib.request.urlopen(url, timeout=40) as answer:
        return sorted(message["payload"] for message in json.load(answer))


def try_to_start(flags: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice", "serve", *flags, "--mqtt", "127.0.0.1:0", "--http", "off"],
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=40,
    )


def test_damaged_store_is_opened_without_the_lost_records_on_request(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    flags = ["--data", str(tmp_path / "data")]
    broker = start_broker(flags=flags)
    with Client.from_url(f"mqtt://{broker.mqtt}", client_id="clerk") as client:
        # each is a separate frame: the next one waits for its acknowledgement
        for number in range(4):
            client.publisher("tasks").send(f"job-{number}")
    broker.kill()
    log = tmp_path / "data/00000001.log"
    log.write_bytes(log.read_bytes().replace(b"job-1", b"job-x"))

    refused = try_to_start(flags)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "00000001.log is damaged at byte" in refused.stderr
    assert "start once with --salvage" in refused.stderr

    salvaged = start_broker(flags=[*flags, "--salvage"])
    assert payloads(salvaged) == ["job-0", "job-2", "job-3"]
    assert "00000001.log is damaged at byte" in salvaged.log_text()
    salvaged.stop()
    again = start_broker(flags=flags)
    assert payloads(again) == ["job-0", "job-2", "job-3"]


def test_invalid_record_ends_the_start_with_an_error_message(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    """The checksum is right: this needs another program that writes to the directory, or a bug."""
    flags = ["--data", str(tmp_path / "data")]
    broker = start_broker(flags=flags)
    with Client.from_url(f"mqtt://{broker.mqtt}", client_id="clerk") as client:
        client.publisher("tasks").send("job-0")
    broker.stop()
    log = tmp_path / "data/00000001.log"
    data = log.read_bytes()
    at, lsn = 0, 0
    while at < len(data):
        lsn = int.from_bytes(data[at + 16 : at + 24], "little")
        at += FRAME_HEADER_BYTES + int.from_bytes(data[at + 4 : at + 8], "little")
    frame = BytesWriter()
    write_record(frame, NOTE, 0, 0, 0, 0, 0, 0, b"\1\2\3")
    body = frame.getvalue()
    salt = int((tmp_path / "data/layout").read_text().split()[2], 16)
    log.write_bytes(data + encode_frame_header(len(body), 1, 0, lsn + 1, salt) + body)

    refused = try_to_start(flags)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"00000001.log is damaged at byte {len(data) + FRAME_HEADER_BYTES}" in refused.stderr
    assert "start once with --salvage" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert payloads(start_broker(flags=[*flags, "--salvage"])) == ["job-0"]
