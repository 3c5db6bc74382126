"""The most that checking a payload against a JSON Schema can cost, computed from the schema alone.

A check runs on the broker's event loop and cannot be interrupted, so its cost must be known before
it starts. The costs here are upper bounds in nanoseconds, measured on one slow core and rounded up;
a real check is usually ten times cheaper. They count every way through the schema by which one
value of a payload is reached:

    applied to the same value    `$ref`, `allOf`, `anyOf`, `oneOf`, `not`, `if` ...: costs add up
    applied to a value inside    `properties`, `items` ...: one property applies to one value

A reference back to a schema that is being expanded closes a cycle. The library remembers the result
of such a schema for each array and object, so each of them costs once per value, however many
branches lead there. It forgets them for `unevaluatedItems` and `unevaluatedProperties`, whose cost
doubles with each level of the payload when two branches lead back: such schemas are refused. The
library also recurses on the C stack, so the number of frames for each level of a payload is
limited, and with it the depth of payloads.

Numbers are counted twice: as if every value were a 64-bit integer (`value_ns`), and the additional
cost of any other number (`slow_ns`). The library compares such numbers as fractions; `payload`
counts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from sluice.json_schema.payload import LARGE_NUMBER, SMALL_NUMBER

KEYWORD_NS: Final = 40
CACHED_RESULT_NS: Final = 100  # looking up a remembered result
CONSTANT_NS: Final = 350  # for each value in a container of `const` and `enum`
PATTERN_START_NS: Final = 100  # starting a regular expression
UNIQUE_ITEMS_NS: Final = 1_500  # calling `uniqueItems`
UNIQUE_VALUE_NS: Final = 2_500  # `uniqueItems`, for each value inside
FORMAT_NS: Final = 3_000
FORMAT_BYTE_NS: Final = 15
SLOW_FORMAT_BYTE_NS: Final = 150  # formats that look up each character, or parse an expression
PATTERN_BYTE_NS: Final = 5  # a regular expression whose automaton stays small
PATTERN_STATE_BYTE_NS: Final = 15  # for each state of one whose automaton does not
METASCHEMA_NS: Final = 20_000  # a reference to a schema that describes schemas

MAX_VALUE_NS: Final = 500_000  # for each value of a payload
UNLIMITED_NS: Final = 1 << 60
MAX_SLOW_NUMBERS: Final = 200  # in an `enum`
MAX_VISITS: Final = 5_000
MAX_FRAMES_PER_LEVEL: Final = 64
MAX_STACK_FRAMES: Final = 16_000  # 90,000 have been seen to fit into a stack of 8 MiB
MAX_PATTERN_STATES: Final = 2_000
SMALL_PATTERN_STATES: Final = 12

_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SLOW_FORMATS: Final = ("idn-hostname", "idn-email", "regex")
_SAME_VALUE_SCHEMA: Final = ("not", "if", "then", "else")
_SAME_VALUE_LIST: Final = ("allOf", "anyOf", "oneOf")
_SAME_VALUE_MAP: Final = ("dependentSchemas", "dependencies")
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_UNEVALUATED: Final = ("unevaluatedItems", "unevaluatedProperties")
_CONSTANTS: Final = ("const", "enum", "default", "examples")  # values, not schemas
_PLAIN_ADDRESS: Final = re.compile(r"[a-z0-9_./:-]+")
_METASCHEMAS: Final = ("http://json-schema.org/", "https://json-schema.org/")


class TooCostly(Exception):
    """A schema whose checks cannot be bounded. Its text says why, and what to change."""


class NumberCost(NamedTuple):
    """Nanoseconds for comparing one number of a payload with one number of a schema."""

    integer_bound: int  # `minimum` and the like that is an integer of 64 bits
    bound: int
    integer_divisor: int  # `multipleOf`
    divisor: int
    constant: int  # in `const` and `enum`


INTEGER_COST: Final = NumberCost(
    integer_bound=350, bound=1_500, integer_divisor=350, divisor=3_000, constant=2_000
)
SLOW_NUMBER_COST: Final = NumberCost(
    integer_bound=1_000, bound=6_000, integer_divisor=1_500, divisor=12_000, constant=8_000
)
EXTREME_FACTOR: Final = 8  # times as much where the schema's own number is very large or small


class Cost(NamedTuple):
    """The maximum cost of a check.

    `once_ns` once, `value_ns` for each value, `slow_ns` for each number that is not a 64-bit
    integer, `byte_ns` for each byte of a payload.
    """

    once_ns: int
    value_ns: int
    slow_ns: int
    byte_ns: int
    nested_ns: int  # for each value and each level of nesting
    is_recursive: bool
    # The library collects the errors of all branches before it reports the first.
    collects_errors: bool
    limits_depth: bool  # payloads can be nested too deeply for it
    max_depth: int  # of a payload


class _NodeCost(NamedTuple):
    """The cost of one schema where it is applied (`here`) and for one value inside (`below`)."""

    here: int
    below: int
    here_byte: int
    below_byte: int
    # comparisons of whole containers on the way to any one value inside
    deep_comparisons: int
    back_references: int  # references back to an open schema on the way to any one value inside
    frames: int
    levels: int
    # position of the outermost open schema that is referred to; _NONE: no such reference
    lowest: int


_NO_REFERENCE: Final = 1 << 30
_LEAF: Final = _NodeCost(KEYWORD_NS, 0, 0, 0, 0, 0, 1, 0, _NO_REFERENCE)


def compute_cost(schema: object) -> Cost:
    """Return the bound for checks against `schema`; raise TooCostly if it is above the limits."""
    try:
        cost = _Analysis(schema, INTEGER_COST).compute()
        slow = _Analysis(schema, SLOW_NUMBER_COST, UNLIMITED_NS).compute()
        slow_ns = max(0, slow.once_ns + slow.value_ns - cost.once_ns - cost.value_ns)
        return cost._replace(slow_ns=slow_ns)
    except RecursionError:
        raise TooCostly("it is nested too deeply; move inner schemas to $defs") from None


class _Analysis:
    def __init__(
        self, schema: object, numbers: NumberCost, max_value_ns: int = MAX_VALUE_NS
    ) -> None:
        self._root = schema
        self._numbers = numbers
        self._max_value_ns = max_value_ns
        self._by_address: dict[str, object] = {}
        self._dynamic: dict[str, list[object]] = {}
        self._base: dict[int, str] = {}
        self._index()
        self._by_address.setdefault("", schema)
        # position of a schema, and the level at which it is applied
        self._open: dict[int, tuple[int, int]] = {}
        self._finished: dict[int, _NodeCost] = {}
        self._recursive_schemas: dict[int, object] = {}
        self._visits = 0
        self._unevaluated = False
        self._collects_errors = False

    def compute(self) -> Cost:
        root = self._walk(self._root, 0)
        once, value, byte = root.here, root.below, root.here_byte + root.below_byte
        frames, levels, back_references, largest = root.frames, root.levels, root.back_references, 0
        deep_comparisons = root.deep_comparisons
        done: set[int] = set()
        while len(done) < len(self._recursive_schemas):  # walking one may find further ones
            for key, target in list(self._recursive_schemas.items()):
                if key in done:
                    continue
                done.add(key)
                walk = self._walk(target, 0)
                if self._unevaluated and walk.back_references > 1:
                    raise TooCostly(
                        "its recursion multiplies: a schema that uses unevaluatedItems or "
                        "unevaluatedProperties "
                        "refers back to itself by more than one branch for the same value; replace "
                        "unevaluated... "
                        "by items or additionalProperties, or merge the branches"
                    )
                value += walk.here + walk.below * max(1, walk.levels)
                byte += walk.here_byte + walk.below_byte
                frames = max(frames, walk.frames)
                levels = max(levels, walk.levels)
                back_references += walk.back_references
                deep_comparisons += walk.deep_comparisons
                largest = max(largest, walk.here)
                self._check_limit(value)
        value += back_references * largest  # results for strings and numbers are not remembered
        is_recursive = bool(self._recursive_schemas)
        if not is_recursive:
            value += deep_comparisons * UNIQUE_VALUE_NS
        self._check_limit(value)
        if frames > MAX_FRAMES_PER_LEVEL:
            raise TooCostly(
                f"it applies {frames} schemas one inside the other to the same value, and at most "
                f"{MAX_FRAMES_PER_LEVEL} are "
                "allowed; merge nested allOf, anyOf, if and chains of $ref"
            )
        return Cost(
            once_ns=once,
            value_ns=value,
            slow_ns=0,
            byte_ns=byte,
            nested_ns=deep_comparisons * UNIQUE_VALUE_NS if is_recursive else 0,
            is_recursive=is_recursive,
            collects_errors=self._collects_errors,
            limits_depth=is_recursive or levels * frames > MAX_STACK_FRAMES,
            max_depth=MAX_STACK_FRAMES // frames,
        )

    def _check_limit(self, value_ns: int) -> None:
        limit_ns = self._max_value_ns
        if value_ns > limit_ns:
            raise TooCostly(
                "there are too many ways through it to the same value "
                f"(about {value_ns // KEYWORD_NS:,}, and at most {limit_ns // KEYWORD_NS:,} "
                "are allowed); refer "
                "to a definition once instead of by several branches of allOf, anyOf or oneOf"
            )

    # ---- finding schemas

    def _index(self) -> None:
        """Index the names of `$id` and anchors.

        Ambiguous names are refused: the library could resolve them differently, and the costs would
        be those of another schema.
        """
        root = self._root
        draft = root.get("$schema") if isinstance(root, dict) else None
        id_key = "id" if isinstance(draft, str) and "draft-04" in draft else "$id"
        pending: list[tuple[object, str, bool]] = [(root, "", True)]
        while pending:
            node, base, may_be_named = pending.pop()
            if isinstance(node, list):
                pending.extend((one, base, False) for one in node)
            if not isinstance(node, dict):
                continue
            name = node.get(id_key)
            if isinstance(name, str) and not (name.startswith("#") and node is not root):
                if node is not root:
                    is_plain = (
                        may_be_named and "$ref" not in node and _PLAIN_ADDRESS.fullmatch(name)
                    )
                    if not is_plain or "/." in name or node.get("$schema", draft) != draft:
                        raise TooCostly(
                            f"the {id_key} {name[:60]!r} in it is ambiguous; only schemas directly "
                            "under $defs may "
                            "have one, a plain address in lower case, with no $ref beside it"
                        )
                base = urldefrag(_join_address(base, name))[0]
                self._register_name(base, node)
            elif isinstance(name, str):
                self._register_name(f"{base}{name}", node)
            self._base[id(node)] = base
            for key in ("$anchor", "$dynamicAnchor"):
                name = node.get(key)
                if isinstance(name, str):
                    self._register_name(f"{base}#{name}", node)
                    if key == "$dynamicAnchor":
                        self._dynamic.setdefault(name, []).append(node)
            if node.get("$recursiveAnchor") is True:
                self._dynamic.setdefault("", []).append(node)
            for key, one in node.items():
                if key in ("$defs", "definitions") and isinstance(one, dict):
                    pending.extend((each, base, node is root) for each in one.values())
                elif key not in _CONSTANTS:
                    pending.append((one, base, False))

    def _register_name(self, address: str, node: object) -> None:
        if self._by_address.setdefault(address, node) is not node:
            raise TooCostly(
                f"two schemas in it have the name {address[:60]!r}; give them different names"
            )

    def _referenced_schemas(self, node: dict[str, Any]) -> Iterator[object]:
        base = self._base.get(id(node), "")
        for key in _REFERENCES:
            reference = node.get(key)
            if not isinstance(reference, str):
                continue
            address, fragment = urldefrag(_join_address(base, reference))
            if address.startswith(_METASCHEMAS) and address not in self._by_address:
                yield None
                continue
            yield self._resolve_reference(address, unquote(fragment), reference)
            if key != "$ref":
                yield from self._dynamic.get(fragment, ())

    def _resolve_reference(self, address: str, fragment: str, reference: str) -> object:
        found = self._by_address.get(address)
        if fragment and not fragment.startswith("/"):
            found = self._by_address.get(f"{address}#{fragment}")
        elif found is not None:
            for part in fragment.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if part in _CONSTANTS:
                    found = None
                    break
                if isinstance(found, dict) and part in found:
                    found = found[part]
                elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                    found = found[int(part)]
                else:
                    found = None
                    break
        if found is None:
            raise TooCostly(
                f"its reference {reference!r} leads nowhere inside it; a schema refers to itself "
                "only: put what it "
                "needs under $defs"
            )
        return found

    # ---- counting

    def _walk(self, node: object, level: int) -> _NodeCost:
        if not isinstance(node, dict):
            return _LEAF
        key = id(node)
        opened = self._open.get(key)
        if opened is not None:
            position, since = opened
            if since == level:
                raise TooCostly(
                    "a $ref in it leads back to itself without going into the value; remove that "
                    "$ref"
                )
            self._recursive_schemas[key] = node
            return _NodeCost(CACHED_RESULT_NS, 0, 0, 0, 0, 1, 1, 0, position)
        known = self._finished.get(key)
        if known is not None:
            return known
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise TooCostly(
                f"there are more than {MAX_VISITS:,} ways through its definitions; use fewer "
                "definitions that refer "
                "to each other"
            )
        position = len(self._open)
        self._open[key] = (position, level)
        try:
            walk = self._expand(node, level)
        finally:
            del self._open[key]
        self._check_limit(walk.here)
        self._check_limit(walk.below)
        if walk.lowest >= position:
            walk = walk._replace(lowest=_NO_REFERENCE)
            self._finished[key] = walk
        return walk

    def _expand(self, node: dict[str, Any], level: int) -> _NodeCost:
        here, here_byte = self._keyword_cost(node)
        below = below_byte = back_references = levels = frames = 0
        deep_comparisons = int(node.get("uniqueItems") is True)
        lowest = _NO_REFERENCE
        # The library evaluates branches a second time for these keywords.
        doubled = any(key in node for key in _UNEVALUATED)
        self._unevaluated = self._unevaluated or doubled
        for schema in self._same_value_schemas(node):
            walk = (
                self._walk(schema, level)
                if schema is not None
                else _LEAF._replace(here=METASCHEMA_NS)
            )
            factor = 2 if doubled else 1
            here += walk.here * factor
            below += walk.below * factor
            here_byte += walk.here_byte * factor
            below_byte += walk.below_byte * factor
            back_references += walk.back_references * factor
            deep_comparisons += walk.deep_comparisons * factor
            frames = max(frames, walk.frames)
            levels = max(levels, walk.levels)
            lowest = min(lowest, walk.lowest)
        sides = []
        for groups in (_array_groups(node), _object_groups(node)):
            side_sum = [0, 0, 0, 0]
            for group in groups:
                group_max = [0, 0, 0, 0]
                for schema in group:
                    walk = self._walk(schema, level + 1)
                    group_max[0] = max(group_max[0], walk.here, walk.below)
                    group_max[1] = max(group_max[1], walk.here_byte, walk.below_byte)
                    group_max[2] = max(group_max[2], walk.back_references)
                    group_max[3] = max(group_max[3], walk.deep_comparisons)
                    frames = max(frames, walk.frames - 1)
                    levels = max(levels, walk.levels + 1)
                    lowest = min(lowest, walk.lowest)
                for nth, amount in enumerate(group_max):
                    side_sum[nth] += amount
            sides.append(side_sum)
        patterns = node.get("patternProperties")
        if isinstance(patterns, dict):  # each is tried on the name of each value inside
            sides[1][0] += PATTERN_START_NS * len(patterns)
            sides[1][1] += sum(_pattern_byte_ns(pattern) for pattern in patterns)
        below += max(sides[0][0], sides[1][0])
        below_byte += max(sides[0][1], sides[1][1])
        back_references += max(sides[0][2], sides[1][2])
        deep_comparisons += max(sides[0][3], sides[1][3])
        return _NodeCost(
            here,
            below,
            here_byte,
            below_byte,
            deep_comparisons,
            back_references,
            frames + 1,
            levels,
            lowest,
        )

    def _keyword_cost(self, node: dict[str, Any]) -> tuple[int, int]:
        """Return the cost of keywords without subschemas, for each value and each byte of text."""
        spent = KEYWORD_NS * (1 + len(node))
        per_byte = 0
        spent += self._number_ns(node)
        if node.get("uniqueItems") is True:
            spent += UNIQUE_ITEMS_NS
        for key in (
            "required",
            "properties",
            "dependentRequired",
            "dependencies",
            "dependentSchemas",
        ):
            named = node.get(key)
            if isinstance(named, list | dict):
                spent += KEYWORD_NS * _count_nested(named, 2 if key.startswith("depend") else 1)
        if isinstance(node.get("pattern"), str):
            spent += PATTERN_START_NS
            per_byte += _pattern_byte_ns(node["pattern"])
        if "format" in node:
            spent += FORMAT_NS
            per_byte += SLOW_FORMAT_BYTE_NS if node["format"] in _SLOW_FORMATS else FORMAT_BYTE_NS
        if "anyOf" in node or "oneOf" in node:
            self._collects_errors = True
        return spent, per_byte

    def _number_ns(self, node: dict[str, Any]) -> int:
        """Return the cost of keywords that compare with a number or a container."""
        numbers = self._numbers
        spent = 0
        for key in _BOUNDS:
            if key in node:
                each = numbers.integer_bound if _is_int64(node[key]) else numbers.bound
                spent += each * _magnitude_factor(node[key])
        if "multipleOf" in node:
            each = numbers.integer_divisor if _is_int64(node["multipleOf"]) else numbers.divisor
            spent += each * _magnitude_factor(node["multipleOf"])
        choices = node.get("enum")
        constants = list(choices) if isinstance(choices, list) else []
        if len(constants) > 1 and all(_is_int64(one) for one in constants):
            # The library looks up 64-bit integers in a table.
            spent += 0 if numbers is INTEGER_COST else numbers.constant * len(constants)
            constants = []
        if "const" in node:
            constants.append(node["const"])
        slow = 0
        for constant in constants:
            size, found, total = _measure_constant(constant)
            if isinstance(constant, list | dict):
                spent += CONSTANT_NS * size
            spent += numbers.constant * total
            slow += found
        if slow > MAX_SLOW_NUMBERS:
            raise TooCostly(
                f"it compares a value with {slow} numbers that are not 64-bit integers, and at "
                f"most {MAX_SLOW_NUMBERS} are allowed; write them as integers in a smaller unit, "
                "or as strings"
            )
        return spent

    def _same_value_schemas(self, node: dict[str, Any]) -> Iterator[object]:
        for key in _SAME_VALUE_SCHEMA:
            if key in node:
                yield node[key] if node[key] is not None else True
        for key in _SAME_VALUE_LIST:
            if isinstance(node.get(key), list):
                yield from node[key]
        for key in _SAME_VALUE_MAP:
            if isinstance(node.get(key), dict):
                yield from (one for one in node[key].values() if isinstance(one, dict))
        yield from self._referenced_schemas(node)


def _array_groups(node: dict[str, Any]) -> Iterator[list[object]]:
    """Yield schemas for array items; of each group only one applies to the same item."""
    by_position: list[object] = []
    for key in ("prefixItems", "items", "additionalItems"):
        found = node.get(key)
        if isinstance(found, list):
            by_position.extend(found)
        elif found is not None:
            by_position.append(found)
    if by_position:
        yield by_position
    for key in ("contains", "unevaluatedItems"):
        if key in node:
            yield [node[key]]


def _object_groups(node: dict[str, Any]) -> Iterator[list[object]]:
    """Yield schemas for object values; of each group only one applies to the same value."""
    named = node.get("properties")
    by_name = list(named.values()) if isinstance(named, dict) else []
    if "additionalProperties" in node:
        by_name.append(node["additionalProperties"])
    if by_name:
        yield by_name
    for key in ("propertyNames", "unevaluatedProperties"):
        if key in node:
            yield [node[key]]
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        for one in patterns.values():
            yield [one]


def _join_address(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference) if base else reference
    except ValueError:
        raise TooCostly(
            f"{reference!r} is not an address; write references as #/$defs/name"
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _magnitude_factor(value: object) -> int:
    """Return how many times longer a comparison with this number takes than an ordinary one."""
    if not isinstance(value, int | float) or not value:
        return 1
    return 1 if SMALL_NUMBER < abs(value) < LARGE_NUMBER else EXTREME_FACTOR


def _measure_constant(constant: object) -> tuple[int, int, int]:
    """Return counts of values, of slow numbers, and of numbers weighted by magnitude.

    Slow numbers are not 64-bit integers. Very large and small numbers count EXTREME_FACTOR times.
    """
    size = slow = total = 0
    pending = [constant]
    while pending:
        value = pending.pop()
        size += 1
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif _is_number(value):
            slow += not _is_int64(value)
            total += _magnitude_factor(value)
    return size, slow, total


def _count_nested(value: object, levels: int = 64) -> int:
    """Return the number of values in a constant."""
    if levels and isinstance(value, dict):
        return 1 + sum(_count_nested(one, levels - 1) for one in value.values())
    if levels and isinstance(value, list):
        return 1 + sum(_count_nested(one, levels - 1) for one in value)
    return 1


def _pattern_byte_ns(pattern: str) -> int:
    """Return nanoseconds for each byte of a text that is matched against `pattern`.

    The engine needs time in proportion to the text. It is fast while the automaton of the pattern
    is small; a pattern of many states can make it fall back to trying all states at each byte. A
    bounded, anchored pattern ends after as many characters as it has states.
    """
    states, is_open = count_pattern_states(pattern)
    if states > MAX_PATTERN_STATES:
        raise TooCostly(
            f"the pattern {pattern[:60]!r} stands for {states:,} states, and at most "
            f"{MAX_PATTERN_STATES:,} are "
            "allowed; use smaller counts in its repetitions"
        )
    is_anchored = pattern.startswith("^") and "|" not in pattern
    if states <= SMALL_PATTERN_STATES or (is_anchored and not is_open):
        return PATTERN_BYTE_NS
    return PATTERN_STATE_BYTE_NS * states


def count_pattern_states(pattern: str) -> tuple[int, bool]:
    """Return the states of a pattern with expanded repetitions, and whether it is unbounded.

    An estimate that needs no knowledge of the syntax beyond brackets, escapes and counts.
    """
    groups = [0]  # states of the groups that are open
    last = 0  # states of the item that a repetition would apply to
    is_open = False
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "\\":
            if pattern[at : at + 1] in ("p", "P") and pattern[at + 1 : at + 2] == "{":
                at = _skip_past(pattern, "}", at)
            else:
                at += 1
            last = 1
            groups[-1] += 1
        elif char == "[":
            at = _skip_class(pattern, at)
            last = 1
            groups[-1] += 1
        elif char == "(":
            groups.append(0)
            last = 0
        elif char == ")":
            last = groups.pop() if len(groups) > 1 else 0
            groups[-1] += last
        elif char == "{" and (count := _parse_repetition(pattern, at)) is not None:
            max_count, is_unbounded, at = count
            is_open = is_open or is_unbounded
            groups[-1] += last * max(0, max_count - 1)
            last *= max(1, max_count)
        elif char in "*+":
            is_open = True
        elif char not in "?^$|":
            last = 1
            groups[-1] += 1
    return sum(groups), is_open


def _skip_past(pattern: str, char: str, at: int) -> int:
    found = pattern.find(char, at)
    return found + 1 if found >= 0 else len(pattern)


def _skip_class(pattern: str, at: int) -> int:
    if pattern[at : at + 1] == "^":
        at += 1
    depth = 1
    while at < len(pattern) and depth:
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
        at += 1
    return at


def _parse_repetition(pattern: str, at: int) -> tuple[int, bool, int] | None:
    """Parse `{2}`, `{2,}` or `{2,5}`: return maximum, whether it is unbounded, and the end."""
    end = pattern.find("}", at)
    min_text, comma, max_text = pattern[at : end if end >= 0 else at].partition(",")
    if (
        not min_text.isdecimal()
        or (max_text and not max_text.isdecimal())
        or len(min_text) > 9
        or len(max_text) > 9
    ):
        return None
    return int(max_text or min_text), bool(comma) and not max_text, end + 1
