"""Checks which build is tested: scripts/test runs the suite compiled, and parts interpreted."""

from __future__ import annotations

import os

import pytest

from sluice.cli.serve import build


def test_build_under_test_is_the_requested_one() -> None:
    expected = os.environ.get("SLUICE_EXPECT")
    if expected is None:
        pytest.skip("SLUICE_EXPECT is not set: any build is accepted")
    assert build() == expected
