"""One connection to the broker: cut and late responses, incomplete clusters, busy brokers, tokens.

A scripted server plays the broker where a real one would have to fail.
"""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sluice import http_client
from sluice.bulk.arrow import build_schema
from sluice.spark import BulkClient, Endpoint
from sluice.spark.errors import BrokerGone, InvalidOption, Refused, StreamCut
from sluice.spark.http import bulk_client
from sluice.spark.source import stream_reader
from sluice.spark.source.offsets import Range
from sluice.spark.source.planner import find_offsets
from sluice.spark.source.range_reader import read_ranges
from sluice.spark.source.source_options import read_options

NAMES = ["value", "partition", "sequence"]


@contextmanager
def scripted_server(*answers: bytes) -> Iterator[tuple[str, list[str]]]:
    """Give one answer to each request, in order, and close the connection after it.

    Yields its address and the requested paths. After the last answer it sends nothing.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[str] = []
    silent: list[socket.socket] = []

    def serve() -> None:
        left = list(answers)
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            request = near.makefile("rb")
            asked.append(request.readline().decode().split(" ")[1])
            length = 0
            while (header := request.readline().strip()) != b"":
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            request.read(length)
            if left:
                near.sendall(left.pop(0))
                near.shutdown(socket.SHUT_RDWR)
            silent.append(near)

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join()
        for one in silent:
            one.close()


def answer(body: object, status: int = 200, **headers: str) -> bytes:
    data = json.dumps(body).encode()
    reported = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return b"HTTP/1.1 %d x\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status,
        reported.encode(),
        len(data),
        data,
    )


def busy(code: str) -> bytes:
    return answer({"error": code, "message": "not now", "do": "Come again"}, 503)


def offsets(queue: str, partitions: int = 1, latest: int = 3) -> dict[str, Any]:
    every = [
        {"partition": nth, "earliest": 0, "latest": latest, "bytes": 30}
        for nth in range(partitions)
    ]
    return {"queue": queue, "dead_letters": False, "incarnation": "1-1", "partitions": every}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)


# ---- responses that are cut


def arrow(first: int, behind: int, end: bool) -> bytes:
    sink = io.BytesIO()
    schema = build_schema(NAMES)
    stream = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema)
    rows = range(first, behind)
    columns = [
        [b"%d" % nth for nth in rows],
        pa.array([0 for _ in rows], pa.int32()),
        pa.array(rows, pa.int64()),
    ]
    stream.write_batch(pa.record_batch(columns, schema=schema))
    if end:
        stream.close()
    return sink.getvalue()


def bare(body: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + body


def chunked(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        len(body),
        body,
    )


@pytest.mark.parametrize("framed", [bare, chunked])
def test_response_that_ends_between_two_batches_is_incomplete(framed: Any) -> None:
    with (
        scripted_server(framed(arrow(0, 2, False)), framed(arrow(2, 4, True))) as (url, asked),
        BulkClient(Endpoint(url, retry_seconds=5)) as client,
    ):
        found = [
            value
            for batch in read_ranges(client, ["value"], [Range("q", 0, 0, 10)])
            for value in batch[0]
        ]
    assert [value.as_py() for value in found] == [b"0", b"1", b"2", b"3"]
    assert len(asked) == 2
    assert "%5B2%2C10%5D" in asked[1], "it goes on behind the last row"


def test_response_without_rows_has_an_end_too() -> None:
    with (
        scripted_server(bare(arrow(0, 0, True)), bare(arrow(0, 0, False))) as (url, _),
        BulkClient(Endpoint(url)) as client,
    ):
        assert sum(batch.num_rows for batch in client.rows("q", {0: (0, 10)}, NAMES)) == 0
        with pytest.raises(StreamCut, match="ends before the rows do"):
            list(client.rows("q", {0: (0, 10)}, NAMES))


def test_stage_with_a_truncated_response_is_sent_again() -> None:
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
    with (
        scripted_server(cut, answer({"stage": "s"})) as (url, asked),
        BulkClient(Endpoint(url)) as client,
    ):
        assert client.stage("app", 0, "q", b"rows") == "s"
        assert len(asked) == 2


# ---- brokers that do not answer, or ask to wait


def test_frozen_broker_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_client, "WAIT_MARGIN_SECONDS", 0.1)
    with (
        scripted_server() as (url, _),
        BulkClient(Endpoint(url, retry_seconds=0)) as client,
        pytest.raises(BrokerGone, match="timed out"),
    ):
        client.offsets("q")


def test_response_may_take_longer_where_the_broker_has_work_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, float]] = []
    send = BulkClient._send_request

    def record_send(
        self: BulkClient,
        method: str,
        path: str,
        body: Any = b"",
        kind: str = "",
        seconds: float = 60.0,
    ) -> Any:
        seen.append((f"{method} {path.partition('?')[0].rpartition('/')[2]}", seconds))
        return send(self, method, path, body, kind, seconds)

    monkeypatch.setattr(BulkClient, "_send_request", record_send)
    answers = (answer(offsets("q")), answer({"replayed": False}), answer({"partitions": {}}))
    with scripted_server(*answers) as (url, _), BulkClient(Endpoint(url)) as client:
        client.offsets("q", {0: 3}, 1)
        client.commit("app", 0, [], 0)
        client.advance("q", "g", {})
    longest = dict(seen)
    assert 31 < longest["GET offsets"] < 60 < longest["POST commit"] == longest["PUT progress"]


@pytest.mark.parametrize("code", ["too_many_readers", "stages_full"])
def test_throttled_reader_waits_as_long_as_the_broker_says(code: str) -> None:
    served = (*(busy(code) for _ in range(5)), answer(offsets("q")))
    with (
        scripted_server(*served) as (url, asked),
        BulkClient(Endpoint(url, retry_seconds=0)) as client,
    ):
        assert client.offsets("q").queue == "q"
        assert len(asked) == 6


def test_other_errors_are_retried_no_longer_than_configured() -> None:
    with client_without_retries(busy("busy")) as client, pytest.raises(Refused, match="not now"):
        client.offsets("q")


@contextmanager
def client_without_retries(*answers: bytes) -> Iterator[BulkClient]:
    with (
        scripted_server(*answers) as (url, _),
        BulkClient(Endpoint(url, retry_seconds=0)) as client,
    ):
        yield client


def test_throttled_reader_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_BUSY_SECONDS", 0.0)
    with (
        client_without_retries(busy("too_many_readers")) as client,
        pytest.raises(Refused, match="not now"),
    ):
        client.offsets("q")


# ---- a cluster in which a node is being replaced


def test_list_without_the_queues_of_a_node_is_requested_again() -> None:
    half = answer([{"name": "a/one"}], X_Sluice_Missing="node-2")
    whole = answer([{"name": "a/one"}, {"name": "a/two"}, {"name": "b"}])
    with scripted_server(half, whole, answer(offsets("a/one")), answer(offsets("a/two"))) as (
        url,
        _,
    ):
        options = read_options({"url": url, "subscribePattern": "a/.*"}, streaming=True)
        with BulkClient(options.where) as client:
            assert list(find_offsets(client, options)) == ["a/one", "a/two"]
    with (
        client_without_retries(half) as client,
        pytest.raises(Refused, match=r"node-2 gave no answer.*retrySeconds"),
    ):
        client.queues()


def test_queue_missing_in_a_list_is_requested_before_it_counts_as_deleted() -> None:
    start = {"v": 1, "queues": {"a/one": {"0": 1}, "a/two": {"0": 1}}}
    listed = answer([{"name": "a/one"}])
    with scripted_server(listed, answer(offsets("a/one")), answer(offsets("a/two"))) as (url, _):
        reader = stream_reader.StreamReader(
            read_options({"url": url, "subscribePattern": "a/.*"}, True), ["value"]
        )
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        reader.stop()
    assert end["queues"] == {"a/one": {"0": 3}, "a/two": {"0": 3}}


# ---- the token


@pytest.mark.parametrize("token", ["se\ncret", "se\rcret", "se\x00cret", "se\x7fcret", "s€cret"])
def test_token_that_cannot_be_sent_is_refused_and_not_shown(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token, "utf-8", newline="")
    for where in (
        Endpoint("http://127.0.0.1:1", token),
        Endpoint("http://127.0.0.1:1", token_file=str(file)),
    ):
        with (
            BulkClient(where) as client,
            pytest.raises(InvalidOption, match=r"option token.*on one line") as refused,
        ):
            client.offsets("q")
        assert "cret" not in str(refused.value)


def test_invalid_token_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe\x00s")
    with pytest.raises(InvalidOption, match=f"option tokenFile: {file} contains"):
        Endpoint("http://127.0.0.1:1", token_file=str(file)).read_token()


# ---- very many partitions


@pytest.mark.parametrize(("partitions", "questions"), [(2000, 2), (4096, 1)])
def test_stream_over_very_many_partitions_splits_its_requests(
    partitions: int, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_reader, "WAIT_SECONDS", 0.001)
    found = offsets("q", partitions, 1_000_000)
    start = {"v": 1, "queues": {"q": {f"{nth}": 1_000_000 for nth in range(partitions)}}}
    with scripted_server(answer(found), answer(found)) as (url, asked):
        reader = stream_reader.StreamReader(
            read_options({"url": url, "subscribe": "q"}, True), ["value"]
        )
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        reader.stop()
    assert end["queues"] == start["queues"]
    assert len(asked) == questions
    assert max(map(len, asked)) < 60_000
