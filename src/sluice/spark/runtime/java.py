"""Find Java for Spark. If there is none, the error says how to install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from sluice.spark.errors import JavaUnavailable

MIN_JAVA_VERSION: Final = 17
INSTALL_REMEDY: Final = (
    f"Install Java {MIN_JAVA_VERSION} or later"
    " (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17)"
    " and put it on the PATH, or name its folder by JAVA_HOME"
)


def find_java() -> str:
    """Return the program that Spark's launcher will start: from JAVA_HOME, else from the PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not os.access(java, os.X_OK):
            raise JavaUnavailable(
                f"JAVA_HOME is {home}, and there is no bin/java in it", INSTALL_REMEDY
            )
        return str(java)
    found = shutil.which("java")
    if found is None:
        raise JavaUnavailable("Spark needs Java, and there is none", INSTALL_REMEDY)
    return found


def check_java() -> None:
    """Raise JavaUnavailable if Java is too old. Accept a Java whose version cannot be parsed."""
    java = find_java()
    version_output = subprocess.run(
        [java, "-version"], capture_output=True, text=True, check=False, timeout=60
    )
    found = re.search(r'version "(?:1\.)?(\d+)', version_output.stderr + version_output.stdout)
    if found is not None and int(found[1]) < MIN_JAVA_VERSION:
        raise JavaUnavailable(
            f"{java} is Java {found[1]}, and Spark needs {MIN_JAVA_VERSION}", INSTALL_REMEDY
        )
