"""The OpenAPI description, checked against a running broker by schemathesis.

Left out are the live stream, which has no end; bulk offsets, which may wait; staging, whose body is
Arrow; and the check `positive_data_acceptance`: a request can match the description and still be
refused because of the state, such as partition 4,000 of a queue that has ten. Every refusal must
still be documented and have the documented shape.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.support.broker_process import Broker, StartBroker

EXAMPLES = 10  # for each operation, besides those for every bound of the description
OPERATION = ("get", "put", "post", "delete")


@pytest.fixture
def broker(start_broker: StartBroker) -> Broker:
    """A broker with the resources that the examples of the description name."""
    broker = start_broker(flags=["--store", "memory", "--grpc", "off"])
    with httpx.Client(base_url=f"http://{broker.address('http')}/api/v1", timeout=30) as api:
        assert api.post(
            "/queues", json={"name": "tasks/image", "limits": {"retention": "1h"}}
        ).is_success
        assert api.post("/queues/tasks$image/groups", json={"name": "workers"}).is_success
        assert api.post(
            "/queues/tasks$image/messages", json={"payload": "x", "message_id": "a-1f"}
        ).is_success
    return broker


@pytest.mark.timeout(300)
def test_api_conforms_to_its_openapi_description(broker: Broker) -> None:
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "schemathesis.cli",
                "run",
                f"http://{broker.address('http')}/openapi.json",
            ),
            *("--exclude-path", "/api/v1/live", "--exclude-checks", "positive_data_acceptance"),
            *("--exclude-operation-id", "offsets", "--exclude-operation-id", "stage"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES)),
            *("--generation-deterministic", "--no-color"),
        ],
        cwd=broker.folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    spec = httpx.get(f"http://{broker.address('http')}/openapi.json", timeout=30).json()
    assert (
        f"Tested: {sum(len(operations) for operations in spec['paths'].values()) - 3}"
        in done.stdout
    )
    assert "Traceback" not in broker.log_text()


def test_responses_match_their_schema(broker: Broker) -> None:
    root = f"http://{broker.address('http')}"
    schemas: dict[str, Any] = httpx.get(f"{root}/openapi.json", timeout=30).json()["components"][
        "schemas"
    ]
    [message] = httpx.get(f"{root}/api/v1/queues/tasks$image/messages", timeout=30).json()
    assert sorted(schemas["Message"]["required"]) == sorted(message)
    assert {"type": "null"} in schemas["Message"]["properties"]["payload"]["anyOf"]


def test_every_operation_is_described(broker: Broker) -> None:
    spec: dict[str, Any] = httpx.get(
        f"http://{broker.address('http')}/openapi.json", timeout=30
    ).json()
    names: list[str] = []
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            assert method in OPERATION
            names.append(operation["operationId"])
            assert operation["description"], path
            assert operation["tags"], path
            assert "422" not in operation["responses"]
            for status, answer in operation["responses"].items():
                if status >= "400":
                    assert answer["content"]["application/json"]["schema"]["$ref"].endswith(
                        "/Refusal"
                    )
            if method != "get":
                assert operation["x-role"] in ("operator", "admin"), path
    assert len(names) == len(set(names)) >= 33
