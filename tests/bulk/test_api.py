"""Who may use the bulk door, how it is described, and what it says without pyarrow."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pytest

from sluice.access.identity import Keyring
from sluice.admin.rest.routes import bulk_routes
from sluice.bulk.staging import Stages, Upload
from sluice.errors import StaleBatch, TooManyRows
from tests.admin.rest.conftest import Door, Tokens, opened
from tests.bulk.conftest import ARROW, arrow_body

BODY = arrow_body(pa.table({"value": ["a"]}))


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with opened(Keyring(Tokens())) as door:
        answer = await door.api.post("/queues", json={"name": "q", "partitions": 1}, headers=token("admin"))
        assert answer.status_code == 201
        yield door


def token(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {role}"}


READS = [
    "/bulk/queues/q/offsets",
    "/bulk/queues/q/offsets/at?time=@1",
    "/bulk/queues/q/partitions/0/rows?start=0&end=0",
    "/bulk/stages/app",
]


async def test_a_viewer_reads_and_does_not_write(door: Door) -> None:
    for path in READS:
        assert (await door.api.get(path)).status_code == 401
        assert (await door.api.get(path, headers=token("viewer"))).status_code == 200, path
    viewer = token("viewer")
    for answer in (
        await door.api.put("/bulk/queues/q/groups/g/progress", json={"partitions": {}}, headers=viewer),
        await door.api.post("/bulk/stages/app/0?queue=q", content=BODY, headers={**ARROW, **viewer}),
        await door.api.post("/bulk/stages/app/0/commit", json={"stages": []}, headers=viewer),
        await door.api.delete("/bulk/stages/app/0", headers=viewer),
    ):
        assert (answer.status_code, answer.json()["error"]) == (403, "not_allowed")


async def test_an_operator_writes_and_commits(door: Door) -> None:
    operator = token("operator")
    answer = await door.api.post("/bulk/stages/app/0?queue=q", content=BODY, headers={**ARROW, **operator})
    assert answer.status_code == 200, answer.text
    stage = answer.json()["stage"]
    answer = await door.api.post("/bulk/stages/app/0/commit", json={"stages": [stage]}, headers=operator)
    assert answer.json() == {"committed": True, "rows": 1, "replayed": False, "skipped": 0}
    told = {"partitions": {"0": 1}, "create": True}
    answer = await door.api.put("/bulk/queues/q/groups/g/progress", json=told, headers=operator)
    assert answer.json() == {"partitions": {"0": 1}}


async def test_every_answer_is_described(door: Door) -> None:
    description = (await door.web.get("/openapi.json")).json()
    paths = {path: found for path, found in description["paths"].items() if path.startswith("/api/v1/bulk/")}
    assert len(paths) == 8
    rows = paths["/api/v1/bulk/queues/{name}/partitions/{partition}/rows"]["get"]["responses"]
    assert {"200", "400", "401", "403", "404", "409", "410", "501", "503"} == set(rows)
    assert list(rows["200"]["content"]) == [ARROW["Content-Type"]]
    staging = paths["/api/v1/bulk/stages/{app}/{batch}"]["post"]
    assert list(staging["requestBody"]["content"]) == [ARROW["Content-Type"]]
    assert staging["x-role"] == "operator"


async def test_without_pyarrow_the_door_says_what_to_install(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("sluice.bulk.arrow.find_spec", lambda name: None if name == "pyarrow" else find(name))
    for answer in (
        await door.api.get("/bulk/queues/q/partitions/0/rows?start=0&end=0", headers=token("viewer")),
        await door.api.post(
            "/bulk/stages/app/0?queue=q", content=BODY, headers={**ARROW, **token("operator")}
        ),
    ):
        assert answer.status_code == 501
        assert answer.json()["error"] == "no_arrow"
        assert answer.json()["do"] == "pip install 'sluice[spark]'"
    assert (await door.api.get("/bulk/queues/q/offsets", headers=token("viewer"))).status_code == 200


def test_a_stage_ends_with_its_time() -> None:
    now = [0.0]
    stages = Stages(None, 1000, 1000, 60.0, lambda: now[0])
    upload = stages.begin("app", 0, "q")
    upload.write(b"x" * 100)
    upload.end()
    stage = upload.finish(1, 0)
    now[0] = 59.0
    assert stages.find("app", 0, [stage.name]) == [stage]
    now[0] = 61.0
    with pytest.raises(StaleBatch):
        stages.find("app", 0, [stage.name])
    assert stages.bytes == 0


@pytest.mark.parametrize("in_files", [False, True])
def test_a_stage_that_somebody_reads_is_given_back_when_he_is_done(in_files: bool, tmp_path: Path) -> None:
    stages = Stages(tmp_path if in_files else None, 1000, 1000, 60.0)
    upload = stages.begin("app", 0, "q")
    upload.write(b"x" * 100)
    upload.end()
    stage = upload.finish(1, 0)
    with stages.reading([stage]):
        assert stages.drop("app", 0) == 1
        with pytest.raises(StaleBatch):
            stages.find("app", 0, [stage.name])
        assert (stage.path.read_bytes() if stage.path else stage.data) == b"x" * 100
    assert stages.bytes == 0
    assert stage.data == b"" and not (stage.path and stage.path.exists())


def test_a_stage_that_is_aborted_while_it_is_looked_through_is_refused() -> None:
    stages = Stages(None, 1000, 1000, 60.0)
    upload = stages.begin("app", 0, "q")
    with stages.reading([upload.stage]):
        upload.write(b"x" * 100)
        upload.end()
        stages.drop("app", 0)
        with pytest.raises(StaleBatch, match="aborted"):
            upload.finish(1, 0)
    assert stages.bytes == 0


UPLOAD = (
    b"POST /api/v1/bulk/stages/app/0?queue=q HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"authorization: Bearer operator\r\ncontent-length: 1000000\r\n"
    b"content-type: application/vnd.apache.arrow.stream\r\n\r\n"
)


async def test_an_upload_of_a_few_bytes_at_a_time_is_ended(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and the whole never would."""
    monkeypatch.setattr(bulk_routes, "UPLOAD_GRACE_SECONDS", 0.5)
    reader, writer = await asyncio.open_connection(door.address.host, door.address.port)
    writer.write(UPLOAD)

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 30)
    dripping.cancel()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"upload_too_slow" in answer and b"8192 bytes a second" in answer and b"smaller batches" in answer
    writer.close()


async def test_a_large_upload_may_take_its_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come buys time for the rest, at the least rate."""
    monkeypatch.setattr(bulk_routes, "UPLOAD_GRACE_SECONDS", 0.1)
    body = arrow_body(pa.table({"value": [bytes(100_000)]}))

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:-1]
        await asyncio.sleep(0.5)  # five times the grace, and a hundredth of what the bytes have bought
        yield body[-1:]

    answer = await door.api.post(
        "/bulk/stages/app/0?queue=q", content=pieces(), headers={**ARROW, **token("operator")}
    )
    assert answer.status_code == 200, answer.text


async def test_an_upload_that_is_broken_off_is_dropped_and_logs_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, dropped = threading.Event(), threading.Event()
    write, abandon = Upload.write, Upload.abandon

    def noted_write(upload: Upload, data: bytes) -> None:
        write(upload, data)
        begun.set()

    def noted_abandon(upload: Upload) -> None:
        abandon(upload)
        dropped.set()

    monkeypatch.setattr(Upload, "write", noted_write)
    monkeypatch.setattr(Upload, "abandon", noted_abandon)
    caplog.set_level(logging.INFO)
    _, writer = await asyncio.open_connection(door.address.host, door.address.port)
    writer.write(UPLOAD + bytes(1000))
    assert await asyncio.to_thread(begun.wait, 30)
    writer.close()
    assert await asyncio.to_thread(dropped.wait, 30)
    for _ in range(3):  # answered by the thread that would log the failure
        await door.api.get("/bulk/stages/app", headers=token("viewer"))
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_the_rows_of_all_stages_of_a_batch_are_limited() -> None:
    stages = Stages(None, 1000, 1000, 60.0, max_batch_rows=10)
    names = []
    for _ in range(2):
        upload = stages.begin("app", 1, "q")
        upload.end()
        names.append(upload.finish(rows=6, unpacked=0).name)
    assert len(stages.find("app", 1, names[:1])) == 1
    with pytest.raises(TooManyRows, match=r"12 rows or more, and 10 are taken"):
        stages.find("app", 1, names)
