"""The types of the console's JavaScript, which the TypeScript compiler checks and does not emit."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.external_programs import need_node_package, need_program

CONFIG = Path(__file__).parents[2] / "node" / "console.tsconfig.json"


def test_javascript_of_the_console_has_no_type_errors() -> None:
    compiler = need_node_package("typescript") / "bin" / "tsc"
    done = subprocess.run(
        [need_program("node"), str(compiler), "-p", str(CONFIG)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
