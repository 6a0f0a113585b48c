"""The flag between the model and the thread that writes."""

from __future__ import annotations

import signal
import threading
import time

from glassengine.recording.ring.ring import Flag


def test_a_flag_is_raised_until_it_is_waited_for() -> None:
    flag = Flag()
    assert not flag.wait(0.0)
    flag.set()
    flag.set()
    assert flag.wait(0.0) and not flag.wait(0.01)
    flag.set()
    flag.clear()
    flag.clear()
    assert not flag.wait(0.0)
    threading.Timer(0.05, flag.set).start()
    assert flag.wait()


class _Late(Exception):
    pass


def test_an_interruption_leaves_it_usable() -> None:
    def interrupt(*_: object) -> None:
        raise _Late

    flag, before, num_late = Flag(), signal.signal(signal.SIGALRM, interrupt), 0
    end = time.monotonic() + 0.7
    try:
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 5e-5)
                try:
                    while True:
                        flag.set()
                        flag.wait(1e-6)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except _Late:
                num_late += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_late > 50
    # Somebody else can still use it.
    other = threading.Thread(target=lambda: (flag.set(), flag.wait(), flag.set()), daemon=True)
    other.start()
    other.join(5)
    assert not other.is_alive()
