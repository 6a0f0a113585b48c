"""A training goes on while its profile server is attacked: its steps, its memory and its threads stay as they are."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.executable.profile_server import KEY_FILE, MAX_CLIENTS
from glassengine.reading.files import user_key
from tests import children

# In a process of its own, so that what is measured is the training and not the attack.
TRAINING = """
import sys, threading, time
import torch
import glassengine as glass

server = glass.profiler.start_server(0, directory=sys.argv[1])
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

BODIES = (b'{"steps": 3, "timeout_s": 0.1}', b'{"steps": 1000000000}' + b" " * 9, b"[" * 30)


class Training:
    """A program that trains, and what it says of itself."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", TRAINING, str(directory)]
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
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv("GLASS_CONFIG_DIR", str(tmp_path / "config"))
    training = Training(tmp_path)
    yield training
    training.stop()


def mutated(rng: random.Random, *, has_key: bool) -> bytes:
    """Return a message, or what comes of a few changes in one; with the key it asks for nothing that is taken."""
    body = rng.choice(BODIES[has_key:])
    data = bytearray(len(body).to_bytes(4, "big") + body)
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
        elif kind == 2:
            del data[place : place + rng.randrange(40)]
        else:
            data[place:place] = bytes(data[place : place + rng.randrange(200)]) * rng.randrange(1, 300)
    return bytes(data)


def attack(port: int, key: bytes, requests: int, seed: int) -> None:
    """Send mutated messages one after another: with the key or without, whole, in half, or left open for a while."""
    rng = random.Random(seed)
    held: list[socket.socket] = []
    for _ in range(requests):
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            client = socket.create_connection(("127.0.0.1", port), timeout=0.3)
            held.append(client)
            has_key = rng.random() < 0.4
            if has_key:
                with Connection(client.dup().detach()) as connection:
                    if connection.poll(0.3):
                        answer_challenge(connection, key if rng.random() < 0.8 else b"not the key")
                        deliver_challenge(connection, key)
            data = mutated(rng, has_key=has_key)
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
    key = user_key(KEY_FILE)
    arguments = [(training.port, key, requests // 2, seed) for seed in (1, 2)]
    attackers = [threading.Thread(target=attack, args=each) for each in arguments]
    for attacker in attackers:
        attacker.start()
    during = training.cost_of_a_step(seconds)
    for attacker in attackers:
        attacker.join()
    assert training.process.poll() is None
    assert training.said[-1][3] - memory < 50_000, "kilobytes"
    assert max(said[4] for said in training.said) <= threads + MAX_CLIENTS + 1
    assert during < most * before, (before, during)
    found = glass.profiler.request(f"localhost:{training.port}", steps=2)
    assert found["complete"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by /proc")
def test_s5_a_training_goes_on_while_it_is_attacked(training: Training) -> None:
    attacked(training, 100, most=2.0, seconds=0.7)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures by /proc")
def test_s5_a_training_goes_on_while_it_is_attacked_for_long(training: Training) -> None:
    attacked(training, 3000, most=1.5, seconds=10.0)
