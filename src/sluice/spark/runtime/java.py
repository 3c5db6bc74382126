"""Spark runs on Java. What is there is used; where there is none, one line says how to get it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from sluice.spark.errors import NoJava

OLDEST: Final = 17
CURE: Final = (
    f"Install Java {OLDEST} or later (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install"
    " openjdk@17) and put it on the PATH, or name its folder by JAVA_HOME"
)


def find_java() -> str:
    """The program that Spark's launcher will start: that of JAVA_HOME, else the one on the PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not os.access(java, os.X_OK):
            raise NoJava(f"JAVA_HOME is {home}, and there is no bin/java in it", CURE)
        return str(java)
    found = shutil.which("java")
    if found is None:
        raise NoJava("Spark needs Java, and there is none", CURE)
    return found


def check_java() -> None:
    """Refuse a Java that is too old; one whose version cannot be read is given its chance."""
    java = find_java()
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    if found is not None and int(found[1]) < OLDEST:
        raise NoJava(f"{java} is Java {found[1]}, and Spark needs {OLDEST}", CURE)
