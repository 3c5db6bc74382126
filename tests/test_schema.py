"""Schemas of payloads: what they may refer to."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from sluice.schema import fault_of_schema, validator_of


def test_a_schema_refers_to_itself_alone(tmp_path: Path) -> None:
    """Whoever configures a queue must not make the broker fetch something, and wait for it."""
    (tmp_path / "whole.json").write_text('{"type": "integer"}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for address in (
            f"http://127.0.0.1:{listener.getsockname()[1]}/whole.json",
            (tmp_path / "whole.json").as_uri(),
        ):
            for schema in ({"$ref": address}, {"items": {"$ref": address}}):
                assert "under $defs" in fault_of_schema(json.dumps(schema))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_schema_may_name_its_own_parts_and_the_drafts() -> None:
    own = {"$ref": "#/$defs/whole", "$defs": {"whole": {"type": "integer"}}}
    assert fault_of_schema(json.dumps(own)) == ""
    assert validator_of(json.dumps(own))(b"1") == ""
    assert validator_of(json.dumps(own))(b'"1"') != ""
    assert fault_of_schema('{"$ref": "https://json-schema.org/draft/2020-12/schema"}') == ""
