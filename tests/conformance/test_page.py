"""docs/conformance.md names every statement of both standards, and tests that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import sluice

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/conformance.md").read_text("utf-8")
SOURCES = Path(sluice.__file__).parent

# The last number of each section that has statements. Sections not in `MISSING` have all numbers.
LAST_NUMBERS = {
    "3.1.1": (
        "1.5.3-3 2.2.2-2 2.3.1-7 3.1.0-2 3.1.2-24 3.1.3-11 3.1.4-5 3.2.0-1 3.2.2-6 3.3.1-12 "
        "3.3.2-3 3.3.4-1 3.3.5-2 3.6.1-1 3.8.1-1 3.8.3-4 3.8.4-6 3.9.3-2 3.10.1-1 3.10.3-2 "
        "3.10.4-6 3.12.4-1 3.14.1-1 3.14.4-3 4.1.0-2 4.3.1-1 4.3.2-2 4.3.3-2 4.4.0-1 4.5.0-2 "
        "4.6.0-6 4.7.1-3 4.7.2-1 4.7.3-4 4.8.0-2 6.0.0-4 7.0.0-2 7.1.1-2 7.1.2-2"
    ),
    "5.0": (
        "1.5.4-3 1.5.5-1 1.5.7-1 2.1.3-1 2.2.1-6 2.2.2-1 3.1.0-2 3.1.2-30 3.1.3-12 3.1.4-6 "
        "3.2.0-2 3.2.2-22 3.3.1-13 3.3.2-20 3.3.4-10 3.4.2-3 3.5.2-3 3.6.1-1 3.6.2-3 3.7.2-3 "
        "3.8.1-1 3.8.3-5 3.8.4-8 3.9.2-2 3.9.3-2 3.10.1-1 3.10.3-2 3.10.4-6 3.11.2-2 3.11.3-2 "
        "3.12.4-1 3.14.0-1 3.14.1-1 3.14.2-4 3.14.4-3 3.15.1-1 3.15.2-3 4.1.0-2 4.2.0-1 4.3.1-1 "
        "4.3.2-5 4.3.3-13 4.4.0-2 4.5.0-2 4.6.0-6 4.7.0-1 4.7.1-2 4.7.2-1 4.7.3-4 4.8.2-6 "
        "4.9.0-3 4.12.0-7 4.12.1-2 4.13.1-1 4.13.2-1 6.0.0-4"
    ),
}
MISSING = {"5.0": {"2.2.1-1"}}  # the standard begins at 2
COUNTS = {
    "3.1.1": {"1": 3, "2": 9, "3": 95, "4": 26, "6": 4, "7": 6},
    "5.0": {"1": 5, "2": 7, "3": 175, "4": 60, "6": 4},
}


def statements(version: str) -> list[tuple[str, str, str]]:
    """Return the rows of a version: number, content, and tests or reason."""
    [part] = re.findall(rf"^## MQTT {re.escape(version)}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return re.findall(r"^\| (\d[\d.]+-\d+) \| ([^|]+) \| ([^|]+) \|$", part, re.M)


def expected_numbers(version: str) -> Iterator[str]:
    for last in LAST_NUMBERS[version].split():
        section, _, number = last.rpartition("-")
        yield from (f"{section}-{nth}" for nth in range(1, int(number) + 1))


@pytest.mark.parametrize("standard", ["3.1.1", "5.0"])
def test_every_statement_is_on_the_page_once_and_in_order(standard: str) -> None:
    numbers = [number for number, _, _ in statements(standard)]
    expected = [one for one in expected_numbers(standard) if one not in MISSING.get(standard, ())]
    assert numbers == expected
    assert Counter(number.split(".")[0] for number in numbers) == COUNTS[standard]


def defined_tests() -> dict[str, list[str]]:
    """Return the files of each test function of the repository, by name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((REPOSITORY / "tests").glob("**/test_*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].append(path.name)
    return found


@pytest.mark.parametrize("standard", ["3.1.1", "5.0"])
def test_every_statement_has_tests_that_exist_or_a_reason(standard: str) -> None:
    defined = defined_tests()
    for number, _, cell in statements(standard):
        tests = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", cell)
        if not tests:
            assert len(cell.split()) > 3, f"{number} has neither a test nor a reason"
        for file_name, test in tests:
            files = defined.get(test, [])
            assert files, f"{number}: no test is named {test}"
            if file_name:
                assert files.count(file_name) == 1, f"{number}: {test} is in {files}"
            else:
                assert len(files) == 1, f"{number}: name the file, {test} is in {files}"


def test_sources_cite_statements_of_the_page() -> None:
    known = {number for version in LAST_NUMBERS for number, _, _ in statements(version)}
    cited: set[str] = set()
    for path in sorted(SOURCES.glob("**/*.py")):
        text = path.read_text("utf-8")
        for section, number, others in re.findall(
            r"MQTT-(\d+\.\d+\.\d+)-(\d+)((?:, (?:MQTT-)?-?[\d.]+(?:-\d+)?)*)", text
        ):
            cited.add(f"{section}-{number}")
            for other in re.findall(r"[\d.]*-\d+", others):
                cited.add(other if other[0] != "-" else f"{section}{other}")
    assert len(cited) > 40
    assert cited <= known
