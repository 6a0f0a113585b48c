"""Profiles of a process that runs: over loopback, by a file, and who may not."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine import spans
from glassengine.errors import UsageError
from glassengine.executable.profile import requests as profile_requests
from glassengine.executable.profile import taker as profile_taker
from glassengine.executable.profile.server import ProfileServer
from glassengine.executable.profile.taker import MAX_S, MAX_STEPS
from tests import children


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "cache"))


def wait_for(done: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProfileServer]:
    monkeypatch.setattr(profile_requests, "POLL_S", 0.02)
    monkeypatch.setattr(profile_requests, "CLOSING_S", 0.1)
    server = glass.profiler.start_server(0, directory=tmp_path / "profiles")
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
        answer = glass.profiler.request(f"localhost:{server.port}", steps=3)
        assert answer["complete"] and answer["num_steps"] >= 3
        found, earlier = glass.profiler.read(answer["directory"])
        assert found.directory == server.directory / f"profile-{number:06d}"
        assert (earlier is None) == (number == 1)
        assert len(found.data["steps_us"]) == answer["num_steps"]
        assert "aten::sum" in found.data["flame"]


@pytest.mark.usefixtures("training")
def test_a_program_and_a_client_in_other_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer named a directory of the program, as seen from there."""
    monkeypatch.chdir(tmp_path)
    server = glass.profiler.start_server(0, directory="profiles")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    answer = glass.profiler.request(f"localhost:{server.port}")
    server.stop()
    assert glass.profiler.read(answer["directory"])[0].directory == tmp_path / "profiles" / "profile-000001"


@pytest.mark.usefixtures("training")
def test_by_a_file(server: ProfileServer) -> None:
    (server.directory / "capture").write_text("4")
    deadline = time.monotonic() + 30
    while not list(server.directory.glob("profile-*/profile.json")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found, _ = glass.profiler.read(server.directory)
    assert found.data["num_steps"] >= 4 and not (server.directory / "capture").exists()


def test_a_program_that_ends_no_step_is_said(server: ProfileServer) -> None:
    answer = glass.profiler.request(f"localhost:{server.port}", steps=3, timeout_s=0.2)
    assert not answer["complete"] and answer["num_steps"] == 0


def ask(
    server: ProfileServer, body: str, *, method: str = "POST", path: str = "/capture"
) -> tuple[int, dict[str, Any]]:
    """Return (status, answer) of one request that has the token."""
    token = json.loads(server.token_file.read_bytes())["token"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, "/capture", body, {"Authorization": f"Bearer {token}"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


@pytest.mark.parametrize(
    "body",
    [
        "no json",
        "[]",
        "[" * 4000,
        '{"steps": 1, "else": ' + "[" * 2000 + "]" * 2000 + "}",
        '{"steps": 0}',
        '{"steps": -1}',
        '{"steps": "many"}',
        '{"steps": true}',
        '{"steps": 1.5}',
        '{"steps": 1e400}',
        '{"steps": 1000000000}',
        '{"steps": ' + "9" * 3900 + "}",
        '{"timeout_s": 1e300}',
        '{"timeout_s": -1}',
        '{"timeout_s": NaN}',
        '{"timeout_s": null}',
        '{"steps": 1, "text": "\\ud800"}\x00',
    ],
)
def test_s5_a_request_that_makes_no_sense_is_refused(server: ProfileServer, body: str) -> None:
    status, answer = ask(server, body)
    assert status == 400 and "request is damaged" in answer["error"]
    assert not list(server.directory.glob("profile-*")) and not spans.is_recording()


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize("body", ["", "{}", '{"steps": 2, "timeout_s": 60, "of a newer version": [[{}]]}'])
def test_s5_its_twin_is_answered(server: ProfileServer, body: str) -> None:
    status, answer = ask(server, body)
    assert status == 200 and answer["complete"] and answer["ended"] == "steps"


@pytest.mark.usefixtures("training")
def test_s5_a_long_capture_is_ended_by_a_client_that_leaves(server: ProfileServer) -> None:
    """A capture of 10^9 steps blocked all later ones."""
    token = json.loads(server.token_file.read_bytes())["token"]
    body = json.dumps({"steps": MAX_STEPS, "timeout_s": MAX_S})
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        head = f"POST /capture HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(spans.is_recording)
        status, answer = ask(server, "{}")
        assert status == 409 and "another profile" in answer["error"]
    wait_for(lambda: not spans.is_recording())
    wait_for(lambda: not server.cancel())
    assert glass.profiler.request(f"localhost:{server.port}")["complete"]


def test_s5_a_long_capture_is_ended_by_a_request(server: ProfileServer) -> None:
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(glass.profiler.request(f"localhost:{server.port}", steps=50))
    )
    asking.start()
    wait_for(spans.is_recording)
    assert ask(server, "", method="DELETE") == (200, {"cancelled": True})
    asking.join()
    assert answers[0]["ended"] == "cancelled" and not answers[0]["complete"]
    assert ask(server, "", method="DELETE") == (200, {"cancelled": False})


def test_s5_a_long_capture_is_ended_by_the_file(server: ProfileServer, caplog: pytest.LogCaptureFixture) -> None:
    (server.directory / "capture").write_text("10000")
    wait_for(spans.is_recording)
    (server.directory / "capture").write_text("0")
    wait_for(lambda: not spans.is_recording())
    wait_for(lambda: "'ended': 'cancelled'" in caplog.text)


def test_s5_a_capture_ends_before_it_takes_the_memory_of_the_program(
    server: ProfileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_taker, "_LEAST_ROOM", 1 << 20)
    monkeypatch.setattr(profile_taker, "_SHARE", 0.0)
    held: list[bytearray] = []
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(server.capture(MAX_STEPS)))
    asking.start()
    wait_for(spans.is_recording)
    peak = profile_taker._resident()
    while profile_taker._resident() < peak + (32 << 20):
        held.append(bytearray(os.urandom(1 << 20)) * 16)
    asking.join(timeout=20)
    assert answers[0]["ended"] == "memory"


@pytest.mark.parametrize("kind", ["pipe", "link", "large", "words", "digits", "directory"])
def test_s5_a_trigger_that_is_none(
    server: ProfileServer, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    trigger = server.directory / "capture"
    if kind == "pipe":
        os.mkfifo(trigger)
    elif kind == "link":
        trigger.symlink_to("/dev/zero")
    elif kind == "directory":
        trigger.mkdir()
    else:
        trigger.write_text({"large": "1" * 100, "words": "many", "digits": "9" * 39}[kind])
    wait_for(lambda: "no profile" in caplog.text or kind == "directory")
    assert trigger.exists() == (kind == "directory")
    assert ask(server, "[]")[0] == 400, "the server lives"
    assert not list(server.directory.glob("profile-*"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_s5_a_file_of_another_user_asks_for_nothing(server: ProfileServer, caplog: pytest.LogCaptureFixture) -> None:
    other = server.directory / "other"
    other.write_text("3")
    os.chown(other, 65534, 65534)
    other.rename(server.directory / "capture")
    wait_for(lambda: "not a plain file of this user" in caplog.text)
    assert not list(server.directory.glob("profile-*"))


def test_s5_a_program_that_profiles_itself_is_left_alone(server: ProfileServer) -> None:
    """A second profiler of torch ended the process as soon as the first one stopped."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(4).sum()
        status, answer = ask(server, '{"timeout_s": 0.1}')
        glass.profiler.start_server(0, directory=server.directory / "second").stop()
    assert status == 409 and "torch.profiler itself" in answer["error"]
    assert any(event.name == "aten::sum" for event in own.events())
    assert ask(server, '{"timeout_s": 0.1}')[0] == 200


@pytest.mark.parametrize("ends_first", [True, False])
def test_s5_a_program_that_begins_to_profile_itself_meanwhile(server: ProfileServer, ends_first: bool) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, '{"timeout_s": 0.5}')))
    asking.start()
    wait_for(spans.is_recording)
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    own.start()
    torch.ones(4).sum()
    if ends_first:
        own.stop()
    asking.join()
    if not ends_first:
        own.stop()
    assert answers[0][0] == 409 and "ended this one" in answers[0][1]["error"]
    assert any(event.name == "aten::sum" for event in own.events())
    assert ask(server, '{"timeout_s": 0.1}')[0] == 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_s5_a_forked_worker_holds_neither_port_nor_token(server: ProfileServer, tmp_path: Path) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # until the test is over
        server.stop()
        os._exit(0)
    try:
        os.close(told)
        sockets = (server._listener._socket, server._listener._wake, server._listener._woken)
        mine = {Path(f"/proc/self/fd/{held.fileno()}").readlink() for held in sockets}
        mine.add(server.token_file)

        def links() -> set[Path]:
            found = set()
            for path in Path(f"/proc/{child}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # the child closes it meanwhile
                    found.add(path.readlink())
            return found

        wait_for(lambda: not mine & links())
        assert ask(server, '{"timeout_s": 0}')[0] == 200, "the parent answers"
        server.stop()
        glass.profiler.start_server(server.port, directory=tmp_path / "again").stop()  # the port is free
    finally:
        os.close(tell)
        _, status = os.waitpid(child, 0)
    assert status == 0


def test_s5_nothing_is_left_of_a_server_that_stopped(tmp_path: Path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    files = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else None
    for _ in range(3):
        server = glass.profiler.start_server(0, directory=tmp_path)
        assert ask(server, '{"timeout_s": 0}')[0] == 200
        server.stop()
        assert not server.token_file.exists()
    wait_for(lambda: {thread.ident for thread in threading.enumerate()} <= before)
    if files is not None:
        assert len(list(Path("/proc/self/fd").iterdir())) <= files


ENDING = """
import sys, time
import torch
import glassengine as glass
from pathlib import Path

server = glass.profiler.start_server(0, directory=sys.argv[1])
Path(sys.argv[1], "capture").write_text("1000")
while not list(server.directory.glob("profile-*")):
    time.sleep(0.05)
for _ in range(5):
    torch.ones(8).sum()
    glass.compat.mark_step()
    time.sleep(0.05)
"""


def test_a_process_that_ends_first_leaves_what_was_taken(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    done = children.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found, _ = glass.profiler.read(tmp_path)
    assert 1 <= found.data["num_steps"] <= 5


def test_a_request_while_a_profile_is_taken_is_refused(server: ProfileServer, tmp_path: Path) -> None:
    with glass.profiler.profile(tmp_path / "other"), pytest.raises(UsageError, match="another profile"):
        glass.profiler.request(f"localhost:{server.port}")


def test_the_port_is_taken(server: ProfileServer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"port {server.port}"):
        glass.profiler.start_server(server.port, directory=tmp_path)


@pytest.mark.parametrize("port", [-1, 65536, 1 << 40])
def test_no_port_at_all(port: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        glass.profiler.start_server(port, directory=tmp_path)


def test_it_lives_without_being_kept(tmp_path: Path) -> None:
    port = glass.profiler.start_server(0, directory=tmp_path).port
    import gc

    gc.collect()
    assert glass.profiler.request(f"localhost:{port}", timeout_s=0)["ended"] == "time"


@pytest.mark.parametrize(
    "address",
    ["localhost", "example.com:9012", "localhost:x", "", "localhost:0", "localhost:99999", "127.0.0.1:1/x"],
)
def test_only_loopback_is_asked(address: str) -> None:
    with pytest.raises(UsageError, match="not the address"):
        glass.profiler.request(address)


def test_no_server(tmp_path: Path) -> None:
    server = glass.profiler.start_server(0, directory=tmp_path)
    server.stop()
    with pytest.raises(UsageError, match=f"no program of this user has a profile server on port {server.port}"):
        glass.profiler.request(f"localhost:{server.port}")
