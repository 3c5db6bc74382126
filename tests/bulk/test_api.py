"""Authorization and description of the bulk API, and its errors without pyarrow."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pytest

from sluice.access.identity import AdminAuthenticator
from sluice.admin.rest.routes import bulk_routes
from sluice.bulk.staging import StageStore, Upload
from sluice.errors import StaleBatch, TooManyRows
from tests.admin.rest.conftest import RestApi, Tokens, opened_rest_api
from tests.bulk.conftest import ARROW, arrow_body

BODY = arrow_body(pa.table({"value": ["a"]}))


@pytest.fixture
async def rest_api() -> AsyncIterator[RestApi]:
    async with opened_rest_api(AdminAuthenticator(Tokens())) as rest_api:
        answer = await rest_api.api.post(
            "/queues", json={"name": "q", "partitions": 1}, headers=token("admin")
        )
        assert answer.status_code == 201
        yield rest_api


def token(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {role}"}


READS = [
    "/bulk/queues/q/offsets",
    "/bulk/queues/q/offsets/at?time=@1",
    "/bulk/queues/q/partitions/0/rows?start=0&end=0",
    "/bulk/stages/app",
]


async def test_viewer_may_read_but_not_write(rest_api: RestApi) -> None:
    for path in READS:
        assert (await rest_api.api.get(path)).status_code == 401
        assert (await rest_api.api.get(path, headers=token("viewer"))).status_code == 200, path
    viewer = token("viewer")
    for answer in (
        await rest_api.api.put(
            "/bulk/queues/q/groups/g/progress", json={"partitions": {}}, headers=viewer
        ),
        await rest_api.api.post(
            "/bulk/stages/app/0?queue=q", content=BODY, headers={**ARROW, **viewer}
        ),
        await rest_api.api.post("/bulk/stages/app/0/commit", json={"stages": []}, headers=viewer),
        await rest_api.api.delete("/bulk/stages/app/0", headers=viewer),
    ):
        assert (answer.status_code, answer.json()["error"]) == (403, "not_allowed")


async def test_operator_may_write_and_commit(rest_api: RestApi) -> None:
    operator = token("operator")
    answer = await rest_api.api.post(
        "/bulk/stages/app/0?queue=q", content=BODY, headers={**ARROW, **operator}
    )
    assert answer.status_code == 200, answer.text
    stage = answer.json()["stage"]
    answer = await rest_api.api.post(
        "/bulk/stages/app/0/commit", json={"stages": [stage]}, headers=operator
    )
    assert answer.json() == {"committed": True, "rows": 1, "replayed": False, "skipped": 0}
    reported = {"partitions": {"0": 1}, "create": True}
    answer = await rest_api.api.put(
        "/bulk/queues/q/groups/g/progress", json=reported, headers=operator
    )
    assert answer.json() == {"partitions": {"0": 1}}


async def test_every_response_is_described(rest_api: RestApi) -> None:
    description = (await rest_api.web.get("/openapi.json")).json()
    paths = {
        path: found
        for path, found in description["paths"].items()
        if path.startswith("/api/v1/bulk/")
    }
    assert len(paths) == 9
    rows = paths["/api/v1/bulk/queues/{name}/partitions/{partition}/rows"]["get"]["responses"]
    assert {"200", "400", "401", "403", "404", "409", "410", "501", "503"} == set(rows)
    assert list(rows["200"]["content"]) == [ARROW["Content-Type"]]
    staging = paths["/api/v1/bulk/stages/{app}/{batch}"]["post"]
    assert list(staging["requestBody"]["content"]) == [ARROW["Content-Type"]]
    assert staging["x-role"] == "operator"


async def test_without_pyarrow_the_error_says_what_to_install(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "sluice.bulk.arrow.find_spec", lambda name: None if name == "pyarrow" else find(name)
    )
    for answer in (
        await rest_api.api.get(
            "/bulk/queues/q/partitions/0/rows?start=0&end=0", headers=token("viewer")
        ),
        await rest_api.api.post(
            "/bulk/stages/app/0?queue=q", content=BODY, headers={**ARROW, **token("operator")}
        ),
    ):
        assert answer.status_code == 501
        assert answer.json()["error"] == "no_arrow"
        assert answer.json()["do"] == "pip install 'sluice[spark]'"
    assert (
        await rest_api.api.get("/bulk/queues/q/offsets", headers=token("viewer"))
    ).status_code == 200


def test_stage_expires() -> None:
    now = [0.0]
    stages = StageStore(None, 1000, 1000, 60.0, lambda: now[0])
    upload = stages.begin("app", 0, "q")
    upload.write(b"x" * 100)
    upload.close_file()
    stage = upload.complete(1, 0)
    now[0] = 59.0
    assert stages.find("app", 0, [stage.name]) == [stage]
    now[0] = 61.0
    with pytest.raises(StaleBatch):
        stages.find("app", 0, [stage.name])
    assert stages.bytes == 0


@pytest.mark.parametrize("in_files", [False, True])
def test_stage_in_use_is_freed_when_its_reader_is_done(in_files: bool, tmp_path: Path) -> None:
    stages = StageStore(tmp_path if in_files else None, 1000, 1000, 60.0)
    upload = stages.begin("app", 0, "q")
    upload.write(b"x" * 100)
    upload.close_file()
    stage = upload.complete(1, 0)
    with stages.hold_open([stage]):
        assert stages.drop_batch("app", 0) == 1
        with pytest.raises(StaleBatch):
            stages.find("app", 0, [stage.name])
        assert (stage.path.read_bytes() if stage.path else stage.data) == b"x" * 100
    assert stages.bytes == 0
    assert stage.data == b"" and not (stage.path and stage.path.exists())


def test_stage_aborted_during_validation_is_refused() -> None:
    stages = StageStore(None, 1000, 1000, 60.0)
    upload = stages.begin("app", 0, "q")
    with stages.hold_open([upload.stage]):
        upload.write(b"x" * 100)
        upload.close_file()
        stages.drop_batch("app", 0)
        with pytest.raises(StaleBatch, match="aborted"):
            upload.complete(1, 0)
    assert stages.bytes == 0


UPLOAD = (
    b"POST /api/v1/bulk/stages/app/0?queue=q HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"authorization: Bearer operator\r\ncontent-length: 1000000\r\n"
    b"content-type: application/vnd.apache.arrow.stream\r\n\r\n"
)


async def test_upload_that_is_too_slow_is_ended(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk arrives in time, but the whole body never would."""
    monkeypatch.setattr(bulk_routes, "UPLOAD_GRACE_SECONDS", 0.5)
    reader, writer = await asyncio.open_connection(rest_api.address.host, rest_api.address.port)
    writer.write(UPLOAD)

    async def drip() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 30)
    dripping.cancel()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert (
        b"upload_too_slow" in answer
        and b"8192 bytes a second" in answer
        and b"smaller batches" in answer
    )
    writer.close()


async def test_large_upload_may_take_longer(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that have arrived extend the time for the rest, at the minimum rate."""
    monkeypatch.setattr(bulk_routes, "UPLOAD_GRACE_SECONDS", 0.1)
    body = arrow_body(pa.table({"value": [bytes(100_000)]}))

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:-1]
        # five times the grace, and a hundredth of the time that the bytes allow
        await asyncio.sleep(0.5)
        yield body[-1:]

    answer = await rest_api.api.post(
        "/bulk/stages/app/0?queue=q", content=pieces(), headers={**ARROW, **token("operator")}
    )
    assert answer.status_code == 200, answer.text


async def test_aborted_upload_is_dropped_without_logging(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    _, writer = await asyncio.open_connection(rest_api.address.host, rest_api.address.port)
    writer.write(UPLOAD + bytes(1000))
    assert await asyncio.to_thread(begun.wait, 30)
    writer.close()
    assert await asyncio.to_thread(dropped.wait, 30)
    for _ in range(3):  # answered by the thread that would log the failure
        await rest_api.api.get("/bulk/stages/app", headers=token("viewer"))
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_rows_of_all_stages_of_a_batch_are_limited() -> None:
    stages = StageStore(None, 1000, 1000, 60.0, max_batch_rows=10)
    names = []
    for _ in range(2):
        upload = stages.begin("app", 1, "q")
        upload.close_file()
        names.append(upload.complete(rows=6, unpacked_bytes=0).name)
    assert len(stages.find("app", 1, names[:1])) == 1
    with pytest.raises(TooManyRows, match=r"12 rows or more, and 10 are accepted"):
        stages.find("app", 1, names)
