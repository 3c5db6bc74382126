"""Tests of JSON schemas for payloads: references, and the cost of checks."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.json_schema import build_validator, find_schema_error


def test_schema_refers_to_itself_only(tmp_path: Path) -> None:
    """A queue's configuration must not make the broker fetch something and wait for it."""
    (tmp_path / "whole.json").write_text('{"type": "integer"}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        for address in (
            f"http://127.0.0.1:{listener.getsockname()[1]}/whole.json",
            (tmp_path / "whole.json").as_uri(),
        ):
            for schema in ({"$ref": address}, {"items": {"$ref": address}}):
                assert "under $defs" in find_schema_error(json.dumps(schema))
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_schema_may_refer_to_its_own_parts_and_the_drafts() -> None:
    own = {"$ref": "#/$defs/whole", "$defs": {"whole": {"type": "integer"}}}
    assert find_schema_error(json.dumps(own)) == ""
    assert build_validator(json.dumps(own))(b"1") == ""
    assert build_validator(json.dumps(own))(b'"1"') != ""
    assert find_schema_error('{"$ref": "https://json-schema.org/draft/2020-12/schema"}') == ""


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


def check_in_subprocess(schema: object, payload: bytes) -> str:
    """Check a payload in another process, with limits on memory and time."""
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from sluice.json_schema import build_validator, find_schema_error\n"
        "schema, payload = sys.stdin.read().split('\\0')\n"
        "error = find_schema_error(schema)\n"
        "validate = build_validator(schema)\n"
        "print(f'refused: {error}' if error else 'checked: ' + validate(payload.encode()))\n"
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


def test_payload_that_fails_every_branch_of_a_recursive_schema_is_checked_quickly() -> None:
    assert check_in_subprocess(TWO_WAYS_BACK, nested(24)) == "checked: it does not match the schema"


def test_chain_of_doubling_definitions_is_refused_with_a_remedy() -> None:
    for keyword in ("allOf", "anyOf", "oneOf"):
        links = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(26)}
        chain = {"$ref": "#/$defs/d0", "$defs": {**links, "d26": {"type": "integer"}}}
        fault = find_schema_error(json.dumps(chain))
        assert "too many ways through it" in fault
        assert "refer to a definition once" in fault


def test_doubling_through_items_is_refused_too() -> None:
    links = {
        f"d{n}": {
            "allOf": [
                {"items": {"$ref": f"#/$defs/d{n + 1}"}},
                {"items": {"$ref": f"#/$defs/d{n + 1}"}},
            ]
        }
        for n in range(26)
    }
    chain = {"$ref": "#/$defs/d0", "$defs": {**links, "d26": {"type": "integer"}}}
    assert "too many ways" in find_schema_error(json.dumps(chain))


def test_recursion_that_multiplies_without_memoization_is_refused() -> None:
    branch = {"prefixItems": [{"$ref": "#"}]}
    schema = {"anyOf": [branch, {**branch, "minItems": 1}], "unevaluatedItems": {"$ref": "#"}}
    assert "its recursion multiplies" in find_schema_error(json.dumps(schema))


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
        assert find_schema_error(json.dumps(schema)) == ""
    check = build_validator(json.dumps(tree))
    assert check(b'{"name": "a", "left": {"name": "b"}}') == ""
    assert check(b'{"name": "a", "left": {"nome": "b"}}') == "it does not match the schema"
    term: object = 1
    for _ in range(100):
        term = {"add": True, "left": term, "right": 2}
    assert build_validator(json.dumps(terms))(json.dumps(term).encode()) == ""


def test_reference_that_never_descends_into_the_value_is_refused() -> None:
    for schema in ({"$ref": "#"}, {"anyOf": [{"type": "string"}, {"not": {"$ref": "#"}}]}):
        assert "leads back to itself" in find_schema_error(json.dumps(schema))


def test_schemas_that_would_overflow_the_stack_are_refused() -> None:
    schema: dict[str, object] = {"items": {"$ref": "#"}}
    for _ in range(150):
        schema = {"if": schema, "then": True}
    assert "one inside the other" in check_in_subprocess(schema, nested(900))
    schema = {"items": {"$ref": "#"}}
    for _ in range(55):
        schema = {"if": schema, "then": True}
    assert check_in_subprocess(schema, nested(900)).startswith("checked: it is nested more than")
    assert check_in_subprocess(schema, nested(100)) == "checked:"


def test_payload_with_too_many_values_to_check_in_time_is_refused() -> None:
    """Comparing numbers is slow: 100 comparisons for each of 300,000 numbers took ten seconds."""
    schema = {"items": {"allOf": [{"minimum": -n, "maximum": 1e9} for n in range(100)]}}
    check = build_validator(json.dumps(schema))
    assert check(json.dumps(list(range(1_000))).encode()) == ""
    assert "too large to be checked" in check(json.dumps(list(range(300_000))).encode())


def test_large_payloads_of_ordinary_schemas_are_checked() -> None:
    order = {
        "type": "object",
        "required": ["id", "lines"],
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
            "scan": {"type": "string"},
            "lines": {
                "type": "array",
                "items": {"type": "object", "properties": {"n": {"minimum": 1}}},
            },
        },
    }
    check = build_validator(json.dumps(order))
    lines = [{"n": n + 1} for n in range(50_000)]
    whole = {"id": "AB-123456", "scan": "x" * 1_000_000, "lines": lines}
    assert check(json.dumps(whole).encode()) == ""
    lines[-1]["n"] = 0
    assert check(json.dumps(whole).encode()).startswith(
        "it does not match the schema (the place is named"
    )
    whole["lines"] = lines[-5_000:]
    assert check(json.dumps(whole).encode()) == "0 is less than the minimum of 1 (at /lines/4999/n)"


@pytest.mark.parametrize("pattern", ["^(?=.*a)b", r"^(a+)\1$", "(?<!a)b"])
def test_patterns_that_need_backtracking_are_refused_with_a_remedy(pattern: str) -> None:
    schemas: list[object] = [{"pattern": pattern}, {"patternProperties": {pattern: {}}}]
    for schema in schemas:
        fault = find_schema_error(json.dumps(schema))
        assert fault.endswith("use no lookaround and no backreference")


def test_patterns_with_many_states_limit_the_text_length() -> None:
    """Two million characters against this pattern took a minute."""
    check = build_validator('{"pattern": "[ab]*a[ab]{400}[cd]"}')
    assert check(json.dumps("ab" * 500).encode()) != ""
    assert "too large to be checked" in check(json.dumps("ab" * 1_000_000).encode())
    assert "smaller counts" in find_schema_error('{"pattern": "((a{100}){100}){100}"}')
    assert build_validator('{"pattern": "^(a+)+$"}')(json.dumps("a" * 2_000_000).encode()) == ""


def items_up_to(size: int, item: Callable[[int], str]) -> bytes:
    """Return a JSON array of about `size` bytes."""
    found: list[str] = []
    length = nth = 0
    while length < size:
        found.append(item(nth))
        length += len(found[-1]) + 1
        nth += 1
    return f"[{','.join(found)}]".encode()


def bracketings(leaves: int) -> list[str]:
    """Return all bracketings of `leaves` ones."""
    ways: list[list[str]] = [[], ["1"]]
    for count in range(2, leaves + 1):
        ways.append(
            [
                f"[{a},{b}]"
                for left in range(1, count)
                for a in ways[left]
                for b in ways[count - left]
            ]
        )
    return ways[leaves]


@pytest.mark.parametrize(
    "payload",
    [
        items_up_to(360_000, lambda nth: str(10**30 + nth)),
        items_up_to(360_000, lambda nth: str(2**64 - 1 - nth)),
        items_up_to(360_000, lambda nth: str(nth * (2**61 - 1))),
        items_up_to(360_000, lambda nth: f"[{10**30 + nth}]"),
        items_up_to(150_000, bracketings(10).__getitem__),
    ],
    ids=["beyond 64 bits", "one double", "one hash", "inside arrays", "brackets"],
)
def test_unique_items_takes_linear_time(payload: bytes) -> None:
    """The library compares each of these with all others: 5 s and more for 360 KB."""
    schema = {"type": "array", "uniqueItems": True}
    assert check_in_subprocess(schema, payload) == "checked:"
    twice = b"[" + payload[1:-1] + b"," + payload[1:-1] + b"]"
    assert check_in_subprocess(schema, twice) != "checked:"


@pytest.mark.parametrize(
    ("items", "is_unique"),
    [
        ('[1, 1.0]', False), ('[1, true, "1", null, "null", "true"]', True), ('[0, false]', True),
        ('[1e16, 10000000000000000]', False), ('[1e30, 1000000000000000019884624838656]', False),
        ('[1e30, 1000000000000000000000000000000]', True), ('[[1, [2]], [1.0, [2]]]', False),
        ('[[1], [[1]], [], [[]], [[], []]]', True),
        ('[{"a": 1, "b": 2}, {"b": 2.0, "a": 1}]', False),
        ('[{"a": 1}, {"a": 2}, {"b": 1}, ["a", 1], "a"]', True), ('[null, null]', False),
        ('[0, -0.0]', False), ('["\\ud800", ["\\ud800"], "a"]', True), ('["a", "b", "a"]', False),
        ('{}', True),
        ('[[true], [1]]', True), ('["[1]", [1]]', True), ('[[1e400], [2]]', True),
        ('[[10000000000000000000000], [1e22]]', False),
        ('[[[-1e22]], [[-10000000000000000000000]]]', False),
        ('[[10000000000000000000001], [1e22]]', True),
        ('[[18446744073709551616], [1.8446744073709552e19]]', False),
    ],
)  # fmt: skip
def test_unique_items_follows_json_schema(items: str, is_unique: bool) -> None:
    fault = build_validator('{"uniqueItems": true}')(items.encode())
    assert fault == ("" if is_unique else "the items are not unique (at /)")
    assert build_validator('{"uniqueItems": false}')(items.encode()) == ""


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"multipleOf": 0.01}, "1e300"),
        ({"multipleOf": 0.01}, "1e-300"),
        ({"multipleOf": 1e-9}, "8888.88"),
        ({"enum": [n + 0.5 for n in range(100)]}, "99.5"),
        ({"enum": [10**30 + n for n in range(100)]}, str(10**30 + 99)),
        ({"enum": list(range(100))}, "1e-300"),
        ({"const": 1.5}, "1.5"),
        ({"minimum": 0.5, "maximum": 1e9}, "1e-300"),
        ({"minimum": 1}, "1e300"),
    ],
)
def test_numbers_that_are_slow_to_compare_limit_the_payload(schema: object, number: str) -> None:
    """One MiB of each took 0.3 to 9 s, and more with larger enums."""
    check = build_validator(json.dumps({"items": schema}))
    assert check(items_up_to(500, lambda _: number)) == "" or number == "1e-300"
    fault = check(items_up_to(1 << 20, lambda _: number))
    assert fault.startswith("it is too large to be checked") and "comparisons of numbers" in fault


def test_whole_numbers_and_ordinary_floats_are_checked_in_large_payloads() -> None:
    whole = build_validator(json.dumps({"items": {"enum": [1, 2, 3, 4, 5], "minimum": 0}}))
    assert whole(items_up_to(1 << 20, lambda nth: str(1 + nth % 5))) == ""
    measured = build_validator(
        json.dumps({"items": {"type": "number", "minimum": -100, "maximum": 1000}})
    )
    assert measured(items_up_to(1 << 20, lambda nth: f"{nth % 100}.125")) == ""
    tags = build_validator(json.dumps({"items": {"type": "string"}, "uniqueItems": True}))
    assert tags(items_up_to(1 << 20, lambda nth: f'"tag-{nth}"')) == ""


def test_long_integers_are_refused_with_a_remedy_and_long_digit_strings_are_not() -> None:
    check = build_validator('{"minimum": 0}')
    for digits in (101, 4_000, 300_000):
        fault = check(b"7" * digits)
        assert f"an integer of {digits:,} digits" in fault and "send it as a string" in fault
    assert check(b"7" * 100) == ""
    assert check(b"0." + b"7" * 300_000) == ""
    assert check(b'"%s"' % (b"7" * 300_000)) == ""


def test_enum_of_many_fractions_is_refused_with_a_remedy() -> None:
    fault = find_schema_error(json.dumps({"enum": [n + 0.5 for n in range(1000)]}))
    assert (
        "1000 numbers that are not 64-bit integers" in fault
        and "in a smaller unit, or as strings" in fault
    )
    assert find_schema_error(json.dumps({"enum": list(range(1000))})) == ""


def test_error_about_a_large_payload_omits_the_value() -> None:
    check = build_validator('{"contains": {"type": "string"}}')
    assert check(b"[1, 2]").startswith("None of [1,2]")
    assert check(items_up_to(400_000, lambda _: "2")).startswith("it does not match the schema")


def test_error_details_are_collected_only_where_cheap() -> None:
    schema = {"anyOf": [{"items": {"type": "string"}}, {"items": {"type": "boolean"}}]}
    check = build_validator(json.dumps(schema))
    assert "is not valid under any of the schemas" in check(b"[1, 2]")
    assert check(json.dumps(list(range(15_000))).encode()) == "it does not match the schema"


def test_error_text_is_short_and_ends_with_the_reason() -> None:
    fault = build_validator('{"type": "integer"}')(json.dumps("x" * 1_000_000).encode())
    assert len(fault) < 1000
    assert 'is not of type "integer"' in fault


def test_references_by_name_are_followed() -> None:
    named = {
        "$id": "https://example.com/order",
        "$ref": "line#whole",
        "$defs": {"line": {"$id": "line", "$defs": {"w": {"$anchor": "whole", "type": "integer"}}}},
    }
    assert find_schema_error(json.dumps(named)) == ""
    assert build_validator(json.dumps(named))(b"1") == ""
    assert build_validator(json.dumps(named))(b'"1"') != ""


def test_ambiguous_names_are_refused() -> None:
    """Otherwise the cost would be computed for one schema, and the checks use another."""
    for schema in (
        {"properties": {"a": {"$id": "inner", "$ref": "#/b", "b": {}}}, "b": {"type": "integer"}},
        {"$defs": {"a": {"$id": "x"}, "b": {"$id": "x"}}},
        {"$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}, "$ref": "#x"},
        {"$ref": "#/const/a", "const": {"a": {"type": "integer"}}},
    ):
        assert "could take too long" in find_schema_error(json.dumps(schema)), schema


def test_stored_schema_that_is_no_longer_accepted_refuses_payloads_with_the_reason() -> None:
    fault = build_validator('{"pattern": "(?=a)"}')(b'"a"')
    assert "Change the schema of the queue" in fault
