"""A training goes on while its profile server is attacked: its steps, its memory and its threads stay as they are."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.errors import CorruptError
from glassengine.executable.profile import requests as profile_requests
from glassengine.executable.profile.requests import Connection, Listener, Reply
from glassengine.executable.profile.taker import Asked
from glassengine.reading.documents import parsed
from tests import children

# In a process of its own, so that what is measured is the training and not the attack.
TRAINING = """
import sys, threading, time
import torch
import glassengine as glass

server = glass.profiler.start_server(0, directory=sys.argv[1], token_file=sys.argv[2])
torch.manual_seed(0)
layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
x = torch.randn(64, 256)
print(server.port, flush=True)
begin = time.monotonic()
for number in range(10**9):
    optimizer.zero_grad()
    layers(x).square().mean().backward()
    optimizer.step()
    glass.compat.mark_step()
    if number % 20 == 0:
        fields = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        memory, threads = int(fields["VmRSS"].split()[0]), threading.active_count()
        print(number, time.monotonic() - begin, time.process_time(), memory, threads, flush=True)
"""

GOOD = b"POST /capture HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: 30\r\n\r\n"
BODIES = (b'{"steps": 3, "timeout_s": 0.1}', b'{"steps": 1000000000}' + b" " * 9, b"[" * 30)


class Training:
    """A program that trains, and what it says of itself."""

    def __init__(self, directory: Path) -> None:
        self.token_file = directory / "token"
        command = [sys.executable, "-c", TRAINING, str(directory), str(self.token_file)]
        self.process = children.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.said: list[tuple[float, ...]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.said.append(tuple(float(word) for word in line.split()))

    def cost_of_a_step(self, seconds: float) -> float:
        """Return the processor time of a step, all threads together: what else runs here does not change it much."""
        begin = len(self.said)
        time.sleep(seconds)
        found = self.said[begin:]
        pairs = itertools.pairwise(found)
        return statistics.median((b[2] - a[2]) / (b[0] - a[0]) for a, b in pairs)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.stop()


def mutated(rng: random.Random, token: bytes) -> bytes:
    """Return a request with something wrong in it: the token, the body, or what comes of a few changes."""
    has_token = rng.random() < 0.4
    data = bytearray(GOOD % (token if has_token else b"not-the-token") + rng.choice(BODIES[has_token:]))
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
        elif kind == 2:
            del data[place : place + rng.randrange(40)]
        elif kind == 3:
            data[place:place] = bytes(data[place : place + rng.randrange(200)]) * rng.randrange(1, 300)
        elif kind == 4:
            data = bytearray(bytes(data).replace(b"30", rng.choice((b"-1", b"9" * 50, b"0x1e", b"+30", b"", b"\xb2"))))
        else:
            lines = bytes(data).split(b"\r\n")
            rng.shuffle(lines)
            data = bytearray(b"\r\n".join(lines))
    return bytes(data)


def attack(port: int, token: bytes, requests: int, seed: int) -> None:
    """Send mutated requests one after another: whole, in half, in pieces, without reading, or left open for a while."""
    rng = random.Random(seed)
    held: list[socket.socket] = []
    for _ in range(requests):
        with contextlib.suppress(OSError):
            client = socket.create_connection(("127.0.0.1", port), timeout=0.3)
            held.append(client)
            data = mutated(rng, token)
            for piece in (data,) if rng.random() < 0.7 else (data[: len(data) // 2], data[len(data) // 2 :]):
                client.sendall(piece)
            if rng.random() < 0.5:
                client.recv(1000)
        while len(held) > rng.randrange(1, 40):
            held.pop(rng.randrange(len(held))).close()
    for client in held:
        client.close()


def attacked(training: Training, requests: int, *, most: float, seconds: float) -> None:
    """Attack a training, and look at it meanwhile and afterwards."""
    before = training.cost_of_a_step(seconds)
    memory, threads = training.said[-1][3], training.said[-1][4]
    token = json.loads(training.token_file.read_bytes())["token"].encode()
    arguments = [(training.port, token, requests // 2, seed) for seed in (1, 2)]
    attackers = [threading.Thread(target=attack, args=each) for each in arguments]
    for attacker in attackers:
        attacker.start()
    during = training.cost_of_a_step(seconds)
    for attacker in attackers:
        attacker.join()
    assert training.process.poll() is None
    assert training.said[-1][3] - memory < 50_000, "kilobytes"
    assert max(said[4] for said in training.said) <= threads + 1
    assert during < most * before, (before, during)
    found = glass.profiler.request(f"localhost:{training.port}", steps=2, token_file=training.token_file)
    assert found["complete"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by /proc")
def test_s5_a_training_goes_on_while_it_is_attacked(training: Training) -> None:
    attacked(training, 100, most=2.0, seconds=0.7)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by /proc")
def test_s5_a_training_goes_on_while_it_is_attacked_for_long(training: Training) -> None:
    attacked(training, 3000, most=1.5, seconds=10.0)


def answered(requests: int, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Send mutated requests as fast as they are answered; return how often each status came, 0 for none."""
    monkeypatch.setattr(profile_requests, "ACCEPTS_PER_S", 1e6)
    monkeypatch.setattr(profile_requests, "REQUEST_S", 0.05)
    rng, token, found = random.Random(18), b"the-token-of-this-test", Counter[int]()

    def answer(method: str, body: bytes, client: Connection) -> Reply:
        try:
            parsed(body, Asked, "the body")
        except CorruptError as error:
            return Reply(400, {"error": str(error)})
        return Reply(200, {})

    listener = Listener(0, token.decode(), answer, lambda client: None, lambda: None)
    listener.start()
    try:
        for _ in range(requests):
            data = b""
            with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as client:
                with contextlib.suppress(ConnectionError):
                    client.sendall(mutated(rng, token))
                with contextlib.suppress(ConnectionError):
                    data = client.recv(1000)
            found[int(data.split(b" ", 2)[1]) if data else 0] += 1
    finally:
        listener.close()
    return found


STATUSES = {0, 200, 400, 401, 403, 404, 405, 408, 413, 414, 431, 501, 505}


def test_s5_mutated_requests_are_answered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = answered(200, monkeypatch)
    assert found.keys() <= STATUSES and {400, 401} <= found.keys() and found[0] < 20
    assert not caplog.records, "none of them was an error of ours"


@pytest.mark.slow
def test_s5_thousands_of_mutated_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = answered(10_000, monkeypatch)
    assert found.keys() <= STATUSES and {200, 400, 401, 403, 408} <= found.keys()
    assert not caplog.records
