"""Spark and Java: sessions, and settings of their processes."""

from sluice.spark.runtime.gc_freeze import freeze_imports
from sluice.spark.runtime.java import find_java
from sluice.spark.runtime.spark_session import session

__all__ = [
    "find_java",
    "freeze_imports",
    "session",
]
