"""Schemas of payloads: what they may refer to, and what a check may cost."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
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


def nested(depth: int) -> bytes:
    return b"[" * depth + b"1" + b"]" * depth


TWO_WAYS_BACK = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {
            "anyOf": [
                {"type": "array", "items": {"$ref": "#/$defs/a"}},
                {"type": "array", "items": {"$ref": "#/$defs/a"}},
            ]
        }
    },
}


def in_a_process_of_its_own(schema: object, payload: bytes) -> str:
    """Check a payload where neither memory nor time nor a crash can harm the other tests."""
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from sluice.schema import fault_of_schema, validator_of\n"
        "schema, payload = sys.stdin.read().split('\\0')\n"
        "fault = fault_of_schema(schema)\n"
        "answer = f'refused: {fault}' if fault else 'checked: ' + validator_of(schema)(payload.encode())\n"
        "print(answer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(schema) + "\0" + payload.decode(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.strip()


def test_a_payload_that_fails_in_every_branch_of_a_recursive_schema_is_answered_at_once() -> None:
    assert in_a_process_of_its_own(TWO_WAYS_BACK, nested(24)) == "checked: it does not match the schema"


def test_a_chain_of_definitions_that_double_is_refused_with_a_remedy() -> None:
    for keyword in ("allOf", "anyOf", "oneOf"):
        links = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(26)}
        chain = {"$ref": "#/$defs/d0", "$defs": {**links, "d26": {"type": "integer"}}}
        fault = fault_of_schema(json.dumps(chain))
        assert "too many ways through it" in fault
        assert "refer to a definition once" in fault


def test_doubling_by_what_is_applied_to_items_is_refused_too() -> None:
    links = {
        f"d{n}": {
            "allOf": [{"items": {"$ref": f"#/$defs/d{n + 1}"}}, {"items": {"$ref": f"#/$defs/d{n + 1}"}}]
        }
        for n in range(26)
    }
    chain = {"$ref": "#/$defs/d0", "$defs": {**links, "d26": {"type": "integer"}}}
    assert "too many ways" in fault_of_schema(json.dumps(chain))


def test_recursion_that_multiplies_where_results_are_not_remembered_is_refused() -> None:
    branch = {"prefixItems": [{"$ref": "#"}]}
    schema = {"anyOf": [branch, {**branch, "minItems": 1}], "unevaluatedItems": {"$ref": "#"}}
    assert "its recursion multiplies" in fault_of_schema(json.dumps(schema))


def test_ordinary_recursive_schemas_are_accepted() -> None:
    tree = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"type": "string"}, "left": {"$ref": "#"}, "right": {"$ref": "#"}},
        "unevaluatedProperties": False,
    }
    binary = {"properties": {"left": {"$ref": "#/$defs/term"}, "right": {"$ref": "#/$defs/term"}}}
    terms = {
        "$ref": "#/$defs/term",
        "$defs": {
            "term": {
                "oneOf": [
                    {"type": "number"},
                    {"type": "object", "required": ["add"], **binary},
                    {"type": "object", "required": ["multiply"], **binary},
                ]
            }
        },
    }
    for schema in (tree, terms):
        assert fault_of_schema(json.dumps(schema)) == ""
    check = validator_of(json.dumps(tree))
    assert check(b'{"name": "a", "left": {"name": "b"}}') == ""
    assert check(b'{"name": "a", "left": {"nome": "b"}}') == "it does not match the schema"
    term: object = 1
    for _ in range(100):
        term = {"add": True, "left": term, "right": 2}
    assert validator_of(json.dumps(terms))(json.dumps(term).encode()) == ""


def test_a_reference_that_never_goes_into_the_value_is_refused() -> None:
    for schema in ({"$ref": "#"}, {"anyOf": [{"type": "string"}, {"not": {"$ref": "#"}}]}):
        assert "leads back to itself" in fault_of_schema(json.dumps(schema))


def test_schemas_that_would_overflow_the_stack_are_refused() -> None:
    schema: dict[str, object] = {"items": {"$ref": "#"}}
    for _ in range(150):
        schema = {"if": schema, "then": True}
    assert "one inside the other" in in_a_process_of_its_own(schema, nested(900))
    schema = {"items": {"$ref": "#"}}
    for _ in range(55):
        schema = {"if": schema, "then": True}
    assert in_a_process_of_its_own(schema, nested(900)).startswith("checked: it is nested more than")
    assert in_a_process_of_its_own(schema, nested(100)) == "checked:"


def test_a_payload_with_more_values_than_can_be_checked_in_time_is_refused() -> None:
    """Comparing numbers is slow: 100 comparisons for each of 300,000 numbers took ten seconds."""
    schema = {"items": {"allOf": [{"minimum": -n, "maximum": 1e9} for n in range(100)]}}
    check = validator_of(json.dumps(schema))
    assert check(json.dumps(list(range(1_000))).encode()) == ""
    assert "too large to be checked" in check(json.dumps(list(range(300_000))).encode())


def test_large_payloads_of_ordinary_schemas_are_checked() -> None:
    order = {
        "type": "object",
        "required": ["id", "lines"],
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
            "scan": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "object", "properties": {"n": {"minimum": 1}}}},
        },
    }
    check = validator_of(json.dumps(order))
    lines = [{"n": n + 1} for n in range(50_000)]
    whole = {"id": "AB-123456", "scan": "x" * 1_000_000, "lines": lines}
    assert check(json.dumps(whole).encode()) == ""
    lines[-1]["n"] = 0
    assert check(json.dumps(whole).encode()) == "0 is less than the minimum of 1 (at /lines/49999/n)"


@pytest.mark.parametrize("pattern", ["^(?=.*a)b", r"^(a+)\1$", "(?<!a)b"])
def test_patterns_that_need_backtracking_are_refused_with_a_remedy(pattern: str) -> None:
    schemas: list[object] = [{"pattern": pattern}, {"patternProperties": {pattern: {}}}]
    for schema in schemas:
        fault = fault_of_schema(json.dumps(schema))
        assert fault.endswith("use no lookaround and no backreference")


def test_patterns_of_many_states_bound_the_text_they_are_matched_against() -> None:
    """Two million characters against this pattern took a minute."""
    check = validator_of('{"pattern": "[ab]*a[ab]{400}[cd]"}')
    assert check(json.dumps("ab" * 500).encode()) != ""
    assert "too large to be checked" in check(json.dumps("ab" * 1_000_000).encode())
    assert "smaller counts" in fault_of_schema('{"pattern": "((a{100}){100}){100}"}')
    assert validator_of('{"pattern": "^(a+)+$"}')(json.dumps("a" * 2_000_000).encode()) == ""


def test_errors_are_told_only_where_collecting_them_is_cheap() -> None:
    schema = {"anyOf": [{"items": {"type": "string"}}, {"items": {"type": "boolean"}}]}
    check = validator_of(json.dumps(schema))
    assert "is not valid under any of the schemas" in check(b"[1, 2]")
    assert check(json.dumps(list(range(100_000))).encode()) == "it does not match the schema"


def test_the_text_of_an_error_is_short_and_ends_with_the_reason() -> None:
    fault = validator_of('{"type": "integer"}')(json.dumps("x" * 1_000_000).encode())
    assert len(fault) < 1000
    assert 'is not of type "integer"' in fault


def test_references_by_name_are_followed() -> None:
    named = {
        "$id": "https://example.com/order",
        "$ref": "line#whole",
        "$defs": {"line": {"$id": "line", "$defs": {"w": {"$anchor": "whole", "type": "integer"}}}},
    }
    assert fault_of_schema(json.dumps(named)) == ""
    assert validator_of(json.dumps(named))(b"1") == ""
    assert validator_of(json.dumps(named))(b'"1"') != ""


def test_names_that_could_be_read_in_two_ways_are_refused() -> None:
    """Else the costs would be counted for one schema, and the checks be made with another."""
    for schema in (
        {"properties": {"a": {"$id": "inner", "$ref": "#/b", "b": {}}}, "b": {"type": "integer"}},
        {"$defs": {"a": {"$id": "x"}, "b": {"$id": "x"}}},
        {"$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}, "$ref": "#x"},
        {"$ref": "#/const/a", "const": {"a": {"type": "integer"}}},
    ):
        assert "could take too long" in fault_of_schema(json.dumps(schema)), schema


def test_a_stored_schema_that_is_not_accepted_any_more_refuses_payloads_and_says_why() -> None:
    fault = validator_of('{"pattern": "(?=a)"}')(b'"a"')
    assert "Change the schema of the queue" in fault
