"""Profiles of a process that runs: over loopback, by a file, and who may not."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine import spans
from glassengine.executable.profile_server import HEADER, ProfileServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ProfileServer]:
    server = glass.start_server(0, directory=tmp_path / "profiles")
    yield server
    server.stop()


@pytest.fixture
def training() -> Iterator[None]:
    """A program that knows nothing of the server but ends its steps."""
    over = threading.Event()

    def train() -> None:
        while not over.wait(0.002):
            torch.ones(4).sum()
            spans.step_ended()

    thread = threading.Thread(target=train)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("training")
def test_over_loopback(server: ProfileServer) -> None:
    for number in (1, 2):
        answer = glass.request_profile(f"localhost:{server.port}", steps=3)
        assert answer["complete"] and answer["num_steps"] >= 3
        found, earlier = glass.read_profiles(answer["directory"])
        assert found.directory == server.directory / f"profile-{number:06d}"
        assert (earlier is None) == (number == 1)
        assert len(found.data["steps_us"]) == answer["num_steps"]
        assert "aten::sum" in found.data["flame"]


@pytest.mark.usefixtures("training")
def test_by_a_file(server: ProfileServer) -> None:
    (server.directory / "capture").write_text("4")
    deadline = time.monotonic() + 30
    while not list(server.directory.glob("profile-*/profile.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found, _ = glass.read_profiles(server.directory)
    assert found.data["num_steps"] >= 4 and not (server.directory / "capture").exists()


def test_a_program_that_ends_no_step_is_said(server: ProfileServer) -> None:
    answer = glass.request_profile(f"localhost:{server.port}", steps=3, timeout_s=0.2)
    assert not answer["complete"] and answer["num_steps"] == 0


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, "{}", 403),
        ({HEADER: "1", "Host": "evil.example:9012"}, "{}", 403),
        ({HEADER: "1"}, "no json", 400),
        ({HEADER: "1"}, "[]", 400),
        ({HEADER: "1"}, '{"steps": 0}', 400),
        ({HEADER: "1"}, '{"steps": "many"}', 400),
        ({HEADER: "1"}, '{"steps": 1e400}', 400),
        ({HEADER: "1"}, '{"timeout_s": 1e300}', 400),
        ({HEADER: "1"}, '{"timeout_s": NaN}', 400),
    ],
)
def test_what_is_refused(server: ProfileServer, headers: dict[str, str], body: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/capture", body, headers)
    response = connection.getresponse()
    assert response.status == status and "error" in json.loads(response.read())
    connection.close()
    assert not list(server.directory.glob("profile-*")) and not spans.is_recording()


ENDING = """
import sys, time
import torch
import glassengine as glass
from pathlib import Path

server = glass.start_server(0, directory=sys.argv[1])
Path(sys.argv[1], "capture").write_text("1000")
while not list(server.directory.glob("profile-*")):
    time.sleep(0.05)
for _ in range(5):
    torch.ones(8).sum()
    glass.mark_step()
    time.sleep(0.05)
"""


def test_a_process_that_ends_first_leaves_what_was_taken(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found, _ = glass.read_profiles(tmp_path)
    assert 1 <= found.data["num_steps"] <= 5


def test_a_request_while_a_profile_is_taken_is_refused(server: ProfileServer, tmp_path: Path) -> None:
    with glass.profile(tmp_path / "other"), pytest.raises(glass.UsageError, match="another profile"):
        glass.request_profile(f"localhost:{server.port}")


def test_the_port_is_taken(server: ProfileServer, tmp_path: Path) -> None:
    with pytest.raises(glass.UsageError, match=f"port {server.port}"):
        glass.start_server(server.port, directory=tmp_path)


def test_it_lives_without_being_kept(tmp_path: Path) -> None:
    port = glass.start_server(0, directory=tmp_path).port
    import gc

    gc.collect()
    with pytest.raises(glass.UsageError, match="at least one step"):
        glass.request_profile(f"localhost:{port}", steps=0)


@pytest.mark.parametrize("address", ["localhost", "example.com:9012", "localhost:x", ""])
def test_only_loopback_is_asked(address: str) -> None:
    with pytest.raises(glass.UsageError, match="not the address"):
        glass.request_profile(address)


def test_no_server(tmp_path: Path) -> None:
    server = glass.start_server(0, directory=tmp_path)
    server.stop()
    with pytest.raises(glass.UsageError, match="no profile server answers"):
        glass.request_profile(f"localhost:{server.port}")
