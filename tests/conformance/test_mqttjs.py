"""mqtt.js over WebSocket and secure WebSocket, as in browsers, and over TCP and TLS, as in Node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.conformance.conftest import Certificates
from tests.support.broker_process import Broker
from tests.support.external_programs import need_node_package, need_program

SCRIPT = Path(__file__).parents[1] / "node" / "client.js"


def test_client_features(
    listening_broker: Broker, certificates: Certificates, listener: str, version: int, name: str
) -> None:
    need_node_package("mqtt")
    address = listening_broker.address(listener)
    path = "/mqtt" if listener in ("ws", "wss") else ""
    url = f"{listener}://{address.host}:{address.port}{path}"
    authority = [str(certificates.ca)] if listener in ("mqtts", "wss") else []
    done = subprocess.run(
        [need_program("node"), str(SCRIPT), url, str(version), name, *authority],
        capture_output=True,
        timeout=40,
    )
    assert done.returncode == 0, done.stderr.decode()
    seen = json.loads(done.stdout)
    for one in [*seen["messages"], seen["retained"], seen["will"]]:
        one.pop("properties", None)
    assert seen["messages"] == [
        {"topic": f"{name}/{qos}", "payload": f"m{qos}", "qos": qos, "retain": False}
        for qos in range(3)
    ]
    assert seen["large"] == 300_000
    assert seen["retained"] == {
        "topic": f"{name}/kept",
        "payload": "kept",
        "qos": 1,
        "retain": True,
    }
    assert seen["will"]["payload"] == "gone"
    assert (seen["present"], seen["resumed"]) == (True, "waited")
    if version == 5:
        assert seen["properties"] == {
            "contentType": "text/plain",
            "responseTopic": "answers",
            "correlationData": "7",
            "messageExpiryInterval": 60,
            "userProperties": {"a": ["1", "2"], "b": "3"},
            "subscriptionIdentifier": 9,
        }
