"""What docs/pipelines.md shows is run, in its order, in the one Spark session of these tests; what it shows of a
cluster is run by test_pipeline_cluster.py."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from sluice.cli import app
from tests.support.broker_process import Broker
from tests.support.doc_pages import stand_in, steps
from tests.spark.conftest import House

HEADERS = pa.map_(pa.string(), pa.binary())


def test_the_pipelines_of_the_page_do_what_they_say(
    spark: SparkSession, running: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(running, "tasks/picture")  # another page of these tests has tasks/image
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLUICE_URL", house.url)
    prepare(house, tmp_path)
    taken = [
        step
        for step in steps("docs/pipelines.md")
        if "spark-submit" not in step[1] and "spark-class" not in step[1]
    ]
    taken.sort(key=lambda step: "file=" not in step[0])  # files first: one is shown behind its use
    for info, text, _ in taken:
        text = text.replace("tasks/image", house.queue)
        text = text.replace("json:", f"json:{tmp_path}/")  # Java stays where it was started
        if info == "sh run":
            for words in commands(text):
                if words[0] == "pip":
                    stand_in(words)
                    continue
                done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
                assert done.exit_code == 0, f"{words}\n{done.output}"
        elif info == "python run":
            exec(text.replace("http://127.0.0.1:8080", house.url), {})
        else:
            (tmp_path / info.partition("=")[2]).write_text(text)
    assert house.values(subscribe="sensors/hot") == ['{"sensor":"s2","celsius":91.5}']
    assert sorted(house.values(subscribe="sensors/clean")) == ["20.5", "91.5"]
    assert house.values(subscribe="tasks/small") == ['{"id":"2"}']
    for name in ("letters.html", "flow.html"):
        assert "<svg" in (tmp_path / name).read_text()
    house.close()


def prepare(house: House, folder: Path) -> None:
    """Two images that are done, and one that was rejected, and done once it was repaired; two sensors; a device."""
    jobs = {"job-1": "cat", "job-2": "dog"}
    house.make()
    house.door.advance(house.queue, "archive", {}, create=True)
    asyncio.run(house.reject(b'{"id": 2, "width": "NaN"}', "width is NaN", message_id="job-3"))
    sent = [[("sent-at", b"2030-01-31T12:00:00Z")]] * len(jobs)
    house.fill(list(jobs.values()), message_id=list(jobs), headers=pa.array(sent, HEADERS))
    house.fill(["cat", "dog", "2"], queue="results", message_id=["job-1", "job-2", "job-3"])
    house.make("sensors/raw")
    house.door.advance(
        "sensors/raw", "cleaners", {}, create=True
    )  # or the first transform would have the last word
    house.fill(["20.5"], queue="sensors/raw", key="s1")
    house.fill(["91.5"], queue="sensors/raw", key="s2")
    house.fill(["on", "off"], queue="devices/state", key="d1")
    (folder / "published.json").write_text(
        "".join(json.dumps({"job": f"job-{nth}"}) + "\n" for nth in (1, 2, 3))
    )


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(re.sub(r"\s#\s.*", "", line)))]
