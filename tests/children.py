"""Starts Python processes that have imported torch already, as `subprocess` starts those that have not.

To import torch takes a child two seconds of processor time, torch.compile and transformers another four, and the suite
starts hundreds. `Popen` and `run` are those of `subprocess`, but the process is a copy of a server that has imported
packages of others and nothing of this one: a child of the caller with its own arguments, environment, directory,
streams, signals and exit status. What cannot be copied (another platform, another interpreter, settings read at
the start) is started by `subprocess`. What a test shows of a start (imports, time) needs `subprocess` itself.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import functools
import gc
import importlib.machinery
import json
import os
import runpy
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Iterable
from multiprocessing import process as processes
from pathlib import Path
from typing import Any

COMPILING = ("torch", "torch._inductor.compile_fx", "torch._inductor.cpp_builder", "torch._functorch.aot_autograd")
MODELS = ("torch", "torch.export", "torch._dynamo", "transformers.models.llama.modeling_llama", "tokenizers")
"""What to have imported, beside torch alone: for children that use torch.compile, and that load or export models."""

_SET_CHILD_SUBREAPER = 36  # of prctl
_MAX_REQUEST = 1 << 20
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "LD_", "TORCH_", "CUDA_", "MALLOC_")
_OWN = ("-I", "-X", "-B", "-O")
_SURROUNDINGS = dict(os.environ)

Request = tuple[list[str], str, dict[str, str], bool]
_one_at_a_time = threading.RLock()  # a server may be a copy of another one
_FREE = 1000
"""Above the numbers of descriptors that are passed on."""


class Popen(subprocess.Popen[Any]):
    """A copy of the server that has imported `imports`, where the command is
    `[sys.executable, -c or -m or -P -m or script]`."""

    def __init__(self, command: list[Any], *, imports: tuple[str, ...] = ("torch",), **options: Any) -> None:
        self._words = [os.fsdecode(word) for word in command]
        self._imports = imports
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        _, _, preexec, _, passed, cwd, env, _, _, shell, *pipes, _, _, _, _, _, session, group = given
        environment = dict(os.environ if env is None else env)
        changed = {
            name
            for name in environment.keys() | _SURROUNDINGS.keys()
            if name.startswith(_READ_AT_START) and name != "PYTHONPATH"
            if environment.get(name) != _SURROUNDINGS.get(name)
        }
        others = preexec or shell or group != -1 or changed
        if sys.platform != "linux" or others or self._words[0] != sys.executable or self._words[1] in _OWN:
            super()._execute_child(*given)
            return
        read, _, _, out, _, error = pipes
        streams = {number: number if end == -1 else end for number, end in enumerate((read, out, error))}
        request = self._words[1:], os.fspath(cwd or Path.cwd()), environment, session
        with _one_at_a_time:
            self.pid = _server(self._imports).copy(request, streams | {number: number for number in passed})
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(
    command: list[Any], *, input: str | None = None, check: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, and keep what it writes as text; with `check` it has to end well."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with Popen(command, **options) as process:
        try:
            out, error = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert not check or process.returncode == 0, error
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def run_ranks(commands: Iterable[list[Any]], *, timeout: float = 300, **options: Any) -> None:
    """Run Python with each of some words at the same time, on one thread each: ranks that all have to end well."""
    surroundings = {**options.pop("env", os.environ), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options |= {"env": surroundings, "stderr": subprocess.PIPE, "text": True}
    running = [Popen([sys.executable, *command], **options) for command in commands]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), "\n".join(errors)


def started_as_copies(imports: tuple[str, ...]) -> types.SimpleNamespace:
    """Return what takes the place of the module `subprocess` in a module that starts Python by it."""
    return types.SimpleNamespace(**vars(subprocess) | {"Popen": functools.partial(Popen, imports=imports)})


class _Server:
    """The process that is copied; it ends when its socket is closed."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), *imports]
        # The import of torch is half of what a server with more than it takes.
        start = Popen if imports[0] == "torch" and imports[1:] else subprocess.Popen
        self._process = start(command, pass_fds=[theirs.fileno()], env=_SURROUNDINGS)
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()

    def copy(self, request: Request, descriptors: dict[int, int]) -> int:
        """Return the process id of a copy, which has the descriptors under the numbers that are their keys."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors.values()))]
        prctl = ctypes.CDLL(None).prctl
        # A copy is the child of a process that ends at once, and so becomes one of ours.
        prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._socket.sendmsg([json.dumps([request, list(descriptors)]).encode()], rights)
            return int(struct.unpack("i", self._socket.recv(4))[0])
        finally:
            prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _server(imports: tuple[str, ...]) -> _Server:
    return _Server(imports)


def _serve(requests: socket.socket) -> Request:
    """Copy this process for every request; return the request in the copy."""
    while True:
        data, rights, _, _ = requests.recvmsg(_MAX_REQUEST, socket.CMSG_SPACE(16 * 4))
        if not data:
            os._exit(0)
        streams = array.array("i", rights[0][2])
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            copy = os.fork()
            if copy:
                os.write(tell, struct.pack("i", copy))
                os._exit(0)
            requests.close()
            while os.getppid() == parent:
                time.sleep(0.001)
            (words, directory, environment, session), numbers = json.loads(data)
            free = [fcntl.fcntl(stream, fcntl.F_DUPFD, _FREE) for stream in streams]
            os.closerange(3, _FREE)
            for number, stream in zip(numbers, free, strict=True):
                os.dup2(stream, number)
            os.closerange(_FREE, max(free) + 1)
            return words, directory, environment, session
        os.waitpid(between, 0)
        requests.send(os.read(told, 4))
        for descriptor in (*streams, told, tell):
            os.close(descriptor)


def _become(words: list[str], directory: str, environment: dict[str, str], session: bool) -> list[str]:
    """Make a copy what a new interpreter is; return the words of its command line from -c, -m or the script on."""
    if session:
        os.setsid()
    before, after = (each.get("PYTHONPATH", "").split(os.pathsep) for each in (os.environ, environment))
    sys.path[:] = [*filter(None, after), *(entry for entry in sys.path[1:] if entry not in before)]
    os.chdir(directory)
    # What modules have kept of the place and the variables of the server.
    processes.ORIGINAL_DIR, tempfile.tempdir = directory, None
    os.environ.clear()
    os.environ.update(environment)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = getattr(sys, name).errors
        stream = open(number, "w" if number else "r", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    return words


def _run(words: list[str]) -> None:
    """Run what an interpreter with this command line does."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=__builtins__, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    is_safe = words[0] == "-P"
    words = words[is_safe:]
    if words[0] == "-m":
        if not is_safe:
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    sys.argv = words
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec")
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))  # noqa: PTH100, PTH120
        main.__file__ = os.path.abspath(words[0])  # noqa: PTH100
        vars(main).update(__cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", main.__file__))
        code = compile(Path(words[0]).read_bytes(), main.__file__, "exec")
    exec(code, vars(main))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # Pages that the collector does not write to stay those of all copies.
    gc.freeze()
    asked = _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    try:
        _run(asked)
    except Exception as error:
        # Without the frames of this file.
        assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
        own = error.__traceback__.tb_next.tb_next
        sys.excepthook(type(error), error.with_traceback(own), own)
        sys.exit(1)
