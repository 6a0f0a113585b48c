"""Profiles of a process that runs: over loopback, by a file, and who may not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine import spans
from glassengine.errors import UsageError
from glassengine.executable import profile_server, profile_taker
from glassengine.executable.profile_server import KEY_FILE, ProfileServer
from glassengine.executable.profile_taker import MAX_S, MAX_STEPS
from glassengine.reading.files import user_key
from tests import children


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASS_CONFIG_DIR", str(tmp_path / "config"))


def wait_for(done: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProfileServer]:
    monkeypatch.setattr(profile_server, "POLL_S", 0.02)
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


def key() -> bytes:
    found = user_key(KEY_FILE)
    assert found is not None
    return found


def connected(server: ProfileServer) -> Connection[Any, Any]:
    """Return a connection on which both sides have proven that they know the key."""
    return Client(("127.0.0.1", server.port), authkey=key())


def ask(server: ProfileServer, body: str) -> dict[str, Any]:
    """Return the answer to one request of a client that has the key."""
    with connected(server) as connection:
        connection.send_bytes(body.encode())
        assert connection.poll(30)
        found: dict[str, Any] = json.loads(connection.recv_bytes())
    return found


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
    assert "request is damaged" in ask(server, body)["error"]
    assert not list(server.directory.glob("profile-*")) and not spans.is_recording()


@pytest.mark.usefixtures("training")
@pytest.mark.parametrize("body", ["{}", '{"steps": 2, "timeout_s": 60, "of a newer version": [[{}]]}'])
def test_s5_its_twin_is_answered(server: ProfileServer, body: str) -> None:
    answer = ask(server, body)
    assert answer["complete"] and answer["ended"] == "steps"


@pytest.mark.usefixtures("training")
def test_s5_a_long_capture_is_ended_by_a_client_that_leaves(server: ProfileServer) -> None:
    """A capture of 10^9 steps blocked all later ones."""
    with connected(server) as client:
        client.send_bytes(json.dumps({"steps": MAX_STEPS, "timeout_s": MAX_S}).encode())
        wait_for(spans.is_recording)
        assert "another profile" in ask(server, "{}")["error"]
    wait_for(lambda: not spans.is_recording())
    wait_for(lambda: not server.cancel())
    assert glass.profiler.request(f"localhost:{server.port}")["complete"]


def test_s5_a_long_capture_is_ended_by_the_program(server: ProfileServer) -> None:
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(glass.profiler.request(f"localhost:{server.port}", steps=50))
    )
    asking.start()
    wait_for(spans.is_recording)
    assert server.cancel()
    asking.join()
    assert answers[0]["ended"] == "cancelled" and not answers[0]["complete"]
    assert not server.cancel()


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
    assert "error" in ask(server, "[]"), "the server lives"
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
        answer = ask(server, '{"timeout_s": 0.1}')
        glass.profiler.start_server(0, directory=server.directory / "second").stop()
    assert "torch.profiler itself" in answer["error"]
    assert any(event.name == "aten::sum" for event in own.events())
    assert ask(server, '{"timeout_s": 0.1}')["ended"] == "time"


@pytest.mark.parametrize("ends_first", [True, False])
def test_s5_a_program_that_begins_to_profile_itself_meanwhile(server: ProfileServer, ends_first: bool) -> None:
    answers: list[dict[str, Any]] = []
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
    assert "ended this one" in answers[0]["error"]
    assert any(event.name == "aten::sum" for event in own.events())
    assert ask(server, '{"timeout_s": 0.1}')["ended"] == "time"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_s5_a_forked_worker_holds_no_port(server: ProfileServer, tmp_path: Path) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # until the test is over
        server.stop()
        os._exit(0)
    try:
        os.close(told)
        mine = {Path(f"/proc/self/fd/{server._socket.fileno()}").readlink()}

        def links() -> set[Path]:
            found = set()
            for path in Path(f"/proc/{child}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # the child closes it meanwhile
                    found.add(path.readlink())
            return found

        wait_for(lambda: not mine & links())
        assert ask(server, '{"timeout_s": 0}')["ended"] == "time", "the parent answers"
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
        assert ask(server, '{"timeout_s": 0}')["ended"] == "time"
        server.stop()
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
    children.run(command, timeout=600, check=True)
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


def test_a_server_lives_without_a_reference(tmp_path: Path) -> None:
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
    with pytest.raises(UsageError, match="no profile server of this user answers"):
        glass.profiler.request(f"localhost:{server.port}")


def test_the_key_is_for_this_user_alone(server: ProfileServer, tmp_path: Path) -> None:
    file = tmp_path / "config" / KEY_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(UsageError, match="no profile server of this user"):
        glass.profiler.request(f"localhost:{server.port}")
    with pytest.raises(UsageError, match="the key of the profile server cannot be used"):
        glass.profiler.start_server(0, directory=tmp_path)


def test_s5_a_client_without_the_key_is_refused(server: ProfileServer) -> None:
    with pytest.raises(AuthenticationError):
        Client(("127.0.0.1", server.port), authkey=b"x" * 32)
    with Client(("127.0.0.1", server.port)) as connection, pytest.raises((OSError, EOFError)):
        connection.recv_bytes()
        connection.send_bytes(b'{"steps": 1}')
        connection.recv_bytes()  # that it is refused
        connection.recv_bytes()
    assert not spans.is_recording() and not list(server.directory.glob("profile-*"))


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n", b"\x00\x00\x00\x05hello", b"\x00", b""])
def test_s5_another_kind_of_server_is_refused(server: ProfileServer, data: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            with other.accept()[0] as client:
                client.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UsageError, match="no profile server of this user"):
            glass.profiler.request(f"localhost:{other.getsockname()[1]}")
        thread.join()


def test_s5_a_server_without_the_key_is_refused(server: ProfileServer) -> None:
    with Listener(("127.0.0.1", 0)) as other:

        def serve() -> None:
            with other.accept() as connection, contextlib.suppress(AuthenticationError, OSError, EOFError):
                deliver_challenge(connection, b"x" * 32)
                answer_challenge(connection, b"x" * 32)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UsageError, match="no profile server of this user"):
            glass.profiler.request(f"localhost:{other.address[1]}")
        thread.join()


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x7f\xff\xff\xff", b"\xff" * 12, b"\x00\x00\x00\x01x" * 9, b"GET / HTTP/1.1\r\n\r\n" * 999]
)
def test_s5_bytes_that_are_no_message(server: ProfileServer, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client, contextlib.suppress(OSError):
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        while client.recv(1 << 12):
            pass
    assert ask(server, '{"timeout_s": 0}')["ended"] == "time"


def test_s5_a_message_that_is_too_large(server: ProfileServer) -> None:
    with connected(server) as connection, pytest.raises((OSError, EOFError)):
        connection.send_bytes(b" " * (profile_server.MAX_REQUEST + 1))
        connection.recv_bytes()
    assert ask(server, '{"timeout_s": 0}')["ended"] == "time"


def test_s5_a_client_that_says_nothing_is_ended(server: ProfileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_server, "REQUEST_S", 0.3)
    with connected(server) as silent, pytest.raises((OSError, EOFError)):
        silent.recv_bytes()


def test_s5_many_silent_clients_keep_nobody_out(server: ProfileServer) -> None:
    """Each of 300 half-sent requests held a thread."""
    with contextlib.ExitStack() as stack:
        for _ in range(5 * profile_server.MAX_CLIENTS):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            client.sendall(b"\x00")
        assert ask(server, '{"timeout_s": 0}')["ended"] == "time"
        assert threading.active_count() < 2 * profile_server.MAX_CLIENTS
