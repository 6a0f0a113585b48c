"""An S3 server of this machine, without any account; and what its environment variables say."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Serve S3 on a free port; yield the variables by which its libraries find it."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.stop()
        S3FileSystem.clear_instance_cache()


def new_bucket(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the environment that leads to the server, and return the URL of a new bucket."""
    import s3fs

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    name = f"test-{uuid.uuid4().hex[:12]}"
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
