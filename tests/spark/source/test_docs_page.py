"""The programs of docs/spark.md run, one after the other, and do what the page says."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.support.broker_process import Broker
from tests.support.doc_pages import blocks, stand_in
from tests.spark.conftest import House


async def test_the_programs_of_the_guide_do_what_they_say(
    spark: SparkSession, running: Broker, tmp_path: Path
) -> None:
    house = House(running, "tasks/image")
    house.make()
    house.door.advance(house.queue, "w", {}, create=True)
    await house.reject(b"cat.jpgg", "not an image")
    await house.reject(b"dog.bmp", "too large")
    page: dict[str, Any] = {}
    for info, text in blocks("docs/spark.md"):
        if info == "sh run":
            for line in text.splitlines():
                stand_in(shlex.split(line, comments=True))
        elif info == "python run":
            text = text.replace("http://127.0.0.1:8080", house.url)
            for name in (
                "images",
                "images-checkpoint",
                "mover-checkpoint",
            ):  # Java stays where it was started
                text = text.replace(f'"{name}"', f'"{tmp_path / name}"')
            exec(text, page)
    assert page["spark"] is spark
    rows = spark.read.parquet(str(tmp_path / "images")).collect()
    assert [row.text for row in rows] == ["cat.jpg"]
    assert house.values(subscribe="tasks/loud") == ["CAT.JPG"]
    assert (house.lag("archive"), house.lag("mover")) == (0, 0)
    house.close()
