"""An S3 server that fails: every fault ends in time, in an error that says what and where, and none in other bytes."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
import zlib
from collections.abc import Iterator
from typing import ClassVar

import pytest

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.stores import objects
from glassengine.stores import objects as ranges

DATA = bytes(range(256)) * 40
URL = "s3://bucket/run/a"


class Server(http.server.BaseHTTPRequestHandler):
    """One object; `faults` are what the next answers to GET do, the last one for ever."""

    protocol_version = "HTTP/1.1"
    faults: ClassVar = ["ok"]
    asked = 0

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()

    def do_GET(self) -> None:
        type(self).asked += 1
        fault = self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]
        if fault == "500":
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "403":
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        if fault == "hang":
            time.sleep(0.4)  # longer than the client reads
        first, last = (int(text) for text in self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[first : last + 1]
        if fault == "short":
            body = body[:-1]
        self.send_response(206)
        if fault == "checksum of the whole":  # which would be larger than a block
            self.send_header("x-amz-checksum-crc32", base64.b64encode(zlib.crc32(DATA * 2).to_bytes(4, "big")).decode())
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(DATA)}")
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        self.close_connection = fault == "cut"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import s3fs
    from fsspec.config import conf

    monkeypatch.setattr(http.server.ThreadingHTTPServer, "handle_error", lambda *_: None)
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    limits = {"connect_timeout": 1, "read_timeout": 0.2, "retries": {"total_max_attempts": 2, "mode": "standard"}}
    # What a variable FSSPEC_S3 sets.
    told = json.dumps({"endpoint_url": f"http://127.0.0.1:{serving.server_address[1]}", "config_kwargs": limits})
    monkeypatch.setitem(conf, "s3", json.loads(told))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    ranges._blocks.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()
    serving.shutdown()
    serving.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("faults", "error", "message"),
    [
        (["ok"], None, ""),
        (["500", "ok"], None, ""),
        (["cut", "ok"], None, ""),
        (["500"], UsageError, "500|Internal"),
        (["cut"], UsageError, "cannot be used"),
        (["hang"], UsageError, "cannot be used"),
        (["403"], UsageError, "credentials are those"),
        (["short"], CorruptError, "not what the store said"),
        (["checksum of the whole"], UsageError, "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"),
    ],
)
def test_a_server_that_fails(faults: list[str], error: type[GlassError] | None, message: str) -> None:
    Server.faults, Server.asked = list(faults), 0
    found = objects.require(URL)
    assert found.size == len(DATA)
    begun = time.monotonic()
    if error is None:
        assert bytes(ranges.read_range(found, 10, 300)) == DATA[10:310]
    else:
        with pytest.raises(error, match=message) as raised:
            ranges.read_range(found, 10, 300)
        assert URL in str(raised.value)
    assert time.monotonic() - begun < 20 and Server.asked <= 20


def test_a_range_may_come_with_the_checksum_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.config import conf

    monkeypatch.delitem(conf["s3"], "config_kwargs")
    Server.faults = ["checksum of the whole"]
    assert bytes(ranges.read_range(objects.require(URL), 10, 300)) == DATA[10:310]


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs
    from fsspec.config import conf

    monkeypatch.setitem(conf["s3"], "endpoint_url", "http://127.0.0.1:1")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL"):
        objects.find(URL)
