"""Regular expressions for client ids, matched in linear time.

Client ids come from anyone who can connect. A backtracking matcher can need exponential time for
some pairs of pattern and text, so patterns are compiled to a nondeterministic automaton and all its
states advance together: at most `MAX_STATES` steps for each character. A pattern must match the
whole client id. Lookaround, back references and flags are refused.
"""

from __future__ import annotations

from re import UNICODE
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from re import error as PatternError  # noqa: N812 - not a class of ours
from typing import Any, Final
from warnings import catch_warnings, simplefilter

MAX_PATTERN_LENGTH: Final = 256
MAX_STATES: Final = 512
# Longer client ids match no regular expression.
MAX_CLIENT_ID_LENGTH: Final = 1024

# A test of one character: (operation, argument).
CharacterTest = tuple[Any, Any]


class ClientPattern:
    """A compiled pattern. Raises ValueError with a sentence if it cannot be used."""

    def __init__(self, pattern: str) -> None:
        self.pattern: str = pattern
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise ValueError(f"has {len(pattern)} characters; use at most {MAX_PATTERN_LENGTH}")
        try:
            with catch_warnings():
                simplefilter("error")  # the meaning of some patterns will change
                tree = sre_parser.parse(pattern)
        except (PatternError, RecursionError, OverflowError, Warning) as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        if tree.state.flags != UNICODE:
            raise ValueError("has flags, which are not supported")
        parsed = list(tree)
        # The whole id must match, so anchors at the ends say nothing more.
        if parsed and parsed[0] == (sre.AT, sre.AT_BEGINNING):
            del parsed[0]
        if parsed and parsed[-1] == (sre.AT, sre.AT_END):
            del parsed[-1]
        # By state: the character that leads to another state, and the states reached without one.
        self._tests: list[CharacterTest | None] = []
        self._next: list[int] = []
        self._jumps: list[list[int]] = []
        start = self._add_state()
        self._end = self._add_sequence(parsed, start)
        self._start = self._expand({start})

    def matches(self, client_id: str) -> bool:
        """Return whether the whole client id matches."""
        if len(client_id) > MAX_CLIENT_ID_LENGTH:
            return False
        states = self._start
        for character in client_id:
            reached = set()
            for state in states:
                test = self._tests[state]
                if test is not None and _fits(test, character):
                    reached.add(self._next[state])
            if not reached:
                return False
            states = self._expand(reached)
        return self._end in states

    def _expand(self, states: set[int]) -> set[int]:
        """Add the states that are reached without a character."""
        found = set(states)
        pending = list(states)
        while pending:
            for state in self._jumps[pending.pop()]:
                if state not in found:
                    found.add(state)
                    pending.append(state)
        return found

    # ---- compilation: each function adds states after `at` and returns the last one

    def _add_state(self) -> int:
        if len(self._tests) >= MAX_STATES:
            raise ValueError("is too large: use smaller repetitions")
        self._tests.append(None)
        self._next.append(0)
        self._jumps.append([])
        return len(self._tests) - 1

    def _add_sequence(self, items: Any, at: int) -> int:
        for item in items:
            at = self._add_item(item, at)
        return at

    def _add_item(self, item: Any, at: int) -> int:
        operation, argument = item
        if operation in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            end = self._add_state()
            self._tests[at] = (operation, argument)
            self._next[at] = end
            # A state has one test: what follows begins in a state of its own.
            after = self._add_state()
            self._jumps[end].append(after)
            return after
        if operation is sre.SUBPATTERN:
            _, added_flags, removed_flags, items = argument
            if added_flags or removed_flags:
                raise ValueError("has flags, which are not supported")
            return self._add_sequence(items, at)
        if operation is sre.BRANCH:
            end = self._add_state()
            for items in argument[1]:
                begin = self._add_state()
                self._jumps[at].append(begin)
                self._jumps[self._add_sequence(items, begin)].append(end)
            return end
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, items = argument
            return self._add_repetition(least, most, items, at)
        raise ValueError("may contain characters, classes, groups, | and repetitions, nothing else")

    def _add_repetition(self, least: int, most: Any, items: Any, at: int) -> int:
        for _ in range(least):
            at = self._add_sequence(items, at)
        end = self._add_state()
        if most is sre.MAXREPEAT:
            begin = self._add_state()
            self._jumps[at].append(begin)
            self._jumps[begin].append(end)
            self._jumps[self._add_sequence(items, begin)].append(begin)
            return end
        self._jumps[at].append(end)
        for _ in range(most - least):
            begin = self._add_state()
            self._jumps[at].append(begin)
            at = self._add_sequence(items, begin)
            self._jumps[at].append(end)
        return end


def _fits(test: CharacterTest, character: str) -> bool:
    operation, argument = test
    if operation is sre.LITERAL:
        return bool(ord(character) == argument)
    if operation is sre.NOT_LITERAL:
        return bool(ord(character) != argument)
    if operation is sre.ANY:
        return character != "\n"
    negated = bool(argument) and argument[0][0] is sre.NEGATE
    return negated != any(_is_in(one, character) for one in argument)


def _is_in(item: Any, character: str) -> bool:
    """Return whether a character is in one item of a class."""
    operation, argument = item
    if operation is sre.LITERAL:
        return bool(ord(character) == argument)
    if operation is sre.RANGE:
        low, high = argument
        return bool(low <= ord(character) <= high)
    if operation is sre.CATEGORY:
        name = str(argument)
        found = (
            character.isdigit()
            if name.endswith("DIGIT")
            else character.isspace()
            if name.endswith("SPACE")
            else character.isalnum() or character == "_"
        )
        return found != ("NOT_" in name)
    return False  # NEGATE
