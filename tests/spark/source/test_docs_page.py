"""The programs of docs/spark.md run, one after the other, and do what the page says."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.spark.conftest import SparkHarness
from tests.support.broker_process import Broker
from tests.support.doc_pages import blocks, stub_command


async def test_programs_of_the_guide_work(
    spark: SparkSession, running: Broker, tmp_path: Path
) -> None:
    harness = SparkHarness(running, "tasks/image")
    harness.make()
    harness.bulk_client.advance(harness.queue, "w", {}, create=True)
    await harness.reject(b"cat.jpgg", "not an image")
    await harness.reject(b"dog.bmp", "too large")
    page: dict[str, Any] = {}
    for info, text in blocks("docs/spark.md"):
        if info == "sh run":
            for line in text.splitlines():
                stub_command(shlex.split(line, comments=True))
        elif info == "python run":
            text = text.replace("http://127.0.0.1:8080", harness.url)
            for name in (
                "images",
                "images-checkpoint",
                "mover-checkpoint",
            ):  # Java keeps the directory that it was started in
                text = text.replace(f'"{name}"', f'"{tmp_path / name}"')
            exec(text, page)
    assert page["spark"] is spark
    rows = spark.read.parquet(str(tmp_path / "images")).collect()
    assert [row.text for row in rows] == ["cat.jpg"]
    assert harness.values(subscribe="tasks/loud") == ["CAT.JPG"]
    lag = (harness.lag("archive"), harness.lag("mover"))
    assert lag == (1, 1), "the program for SQL inserts a message after these streams have ended"
    harness.close()
