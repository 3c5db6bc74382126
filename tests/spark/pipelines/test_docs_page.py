"""The examples of docs/pipelines.md run, in their order, in the one Spark session of these tests.

test_spark_submit.py runs those for a cluster.
"""

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

from sluice.cli.root import app
from tests.spark.conftest import SparkHarness
from tests.support.broker_process import Broker
from tests.support.doc_pages import steps, stub_command

HEADERS = pa.map_(pa.string(), pa.binary())


def test_pipelines_of_the_page_work(
    spark: SparkSession, running: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = SparkHarness(running, "tasks/picture")  # another page of these tests has tasks/image
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLUICE_URL", harness.url)
    prepare(harness, tmp_path)
    taken = [
        step
        for step in steps("docs/pipelines.md")
        if "spark-submit" not in step[1] and "spark-class" not in step[1]
    ]
    taken.sort(key=lambda step: "file=" not in step[0])  # files first: one is shown after its use
    for info, text, _ in taken:
        text = text.replace("tasks/image", harness.queue)
        # Java keeps the directory that it was started in
        text = text.replace("json:", f"json:{tmp_path}/")
        if info == "sh run":
            for words in commands(text):
                if words[0] == "pip":
                    stub_command(words)
                    continue
                done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
                assert done.exit_code == 0, f"{words}\n{done.output}"
        elif info == "python run":
            exec(text.replace("http://127.0.0.1:8080", harness.url), {})
        else:
            (tmp_path / info.partition("=")[2]).write_text(text)
    assert harness.values(subscribe="sensors/hot") == ['{"sensor":"s2","celsius":91.5}']
    assert sorted(harness.values(subscribe="sensors/clean")) == ["20.5", "91.5"]
    assert harness.values(subscribe="tasks/small") == ['{"id":"2"}']
    for name in ("dead-letters.html", "flow.html"):
        assert "<svg" in (tmp_path / name).read_text()
    harness.close()


def prepare(harness: SparkHarness, folder: Path) -> None:
    """Publish two images that are processed, and one that is rejected and later repaired; two
    sensors; a device.
    """
    jobs = {"job-1": "cat", "job-2": "dog"}
    harness.make()
    harness.bulk_client.advance(harness.queue, "archive", {}, create=True)
    asyncio.run(harness.reject(b'{"id": 2, "width": "NaN"}', "width is NaN", message_id="job-3"))
    sent = [[("sent-at", b"2030-01-31T12:00:00Z")]] * len(jobs)
    harness.fill(list(jobs.values()), message_id=list(jobs), headers=pa.array(sent, HEADERS))
    harness.fill(["cat", "dog", "2"], queue="results", message_id=["job-1", "job-2", "job-3"])
    harness.make("sensors/raw")
    harness.bulk_client.advance(
        "sensors/raw", "cleaners", {}, create=True
    )  # or the first transform would have the last value
    harness.fill(["20.5"], queue="sensors/raw", key="s1")
    harness.fill(["91.5"], queue="sensors/raw", key="s2")
    harness.fill(["on", "off"], queue="devices/state", key="d1")
    (folder / "published.json").write_text(
        "".join(json.dumps({"job": f"job-{nth}"}) + "\n" for nth in (1, 2, 3))
    )


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(re.sub(r"\s#\s.*", "", line)))]
