"""`glass mcp`, driven by the official SDK's own client over stdio."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.cli.main import main

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")
anyio = pytest.importorskip("anyio")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.save({"a": torch.ones(4)}, tmp_path / "one.pt")
    torch.save({"a": torch.tensor([1.0, 1.0, 2.0, 1.0])}, tmp_path / "two.pt")
    (tmp_path / "loud.py").write_text(
        'import torch\nprint(\'{"jsonrpc": "2.0"}\')\n'
        "def net():\n    torch.manual_seed(0)\n    return torch.nn.Linear(2, 2).eval()\n"
        "def other():\n    model = net()\n    model.weight.data += 1\n    return model\n"
    )
    return tmp_path


def driven(root: Path, drive: Callable[[Any], Awaitable[None]], *flags: str) -> None:
    """Start the server as a client does, and let `drive` talk to it."""
    words = ["-m", "glassengine", "mcp", str(root), *flags]
    # Only what the SDK hands down by itself, and where the package is.
    server = mcp.StdioServerParameters(
        command=sys.executable,
        args=words,
        cwd=str(root),
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )

    async def run() -> None:
        async with mcp.stdio_client(server) as streams, mcp.ClientSession(*streams) as session:
            started = await session.initialize()
            assert "\n0. Do both sides get the same tokens" in started.instructions
            await drive(session)

    anyio.run(run)


def text_of(answer: Any) -> str:
    return "\n".join(part.text for part in answer.content)


def test_the_tools_over_stdio(root: Path) -> None:
    async def drive(session: Any) -> None:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert sorted(tools) == ["check", "check_prompt", "compare", "explain", "show"]
        assert all(tool.description for tool in tools.values())
        assert {name for name, tool in tools.items() if tool.annotations.read_only_hint} == tools.keys() - {"check"}

        answer = await session.call_tool("compare", {"baseline": "one.pt", "candidate": "two.pt"})
        assert not answer.is_error, text_of(answer)
        assert text_of(answer).startswith("NOT OK") and text_of(answer).endswith("exit status 1; result: result-1")
        assert "\nnext: glass explain result-1 a\n" in text_of(answer)
        answer = await session.call_tool("explain", {"result": "result-1", "site": "a"})
        assert "1 of 4 elements differ" in text_of(answer)
        answer = await session.call_tool("show", {"recording": "one.pt", "pattern": "a"})
        assert "float32[4]" in text_of(answer)

        for tool, arguments in (
            ("compare", {"baseline": "/etc/passwd", "candidate": "two.pt"}),
            ("show", {"recording": "../secret.pt"}),
            ("show", {"recording": "https://example.org/x.pt"}),
            ("explain", {"result": "../result-1"}),
            ("check_prompt", {"baseline": "one.pt", "candidate": "vllm:one"}),
            ("check", {"baseline": "loud.py:net"}),
        ):
            refused = await session.call_tool(tool, arguments)
            assert refused.is_error and ("refused" in text_of(refused) or "runs no code" in text_of(refused))
        # A pattern is never an option.
        answer = await session.call_tool("show", {"recording": "one.pt", "pattern": "--export=stolen.pt"})
        assert answer.is_error and not (root / "stolen.pt").exists()

    driven(root, drive)


@pytest.mark.slow
def test_check_runs_a_factory_that_prints_where_that_was_allowed(root: Path) -> None:
    async def drive(session: Any) -> None:
        arguments = {"baseline": "loud.py:net", "candidate": "loud.py:other", "inputs": "x.pt"}
        answer = await session.call_tool("check", arguments)
        assert not answer.is_error, text_of(answer)
        assert "NOT OK" in text_of(answer) and text_of(answer).endswith("result: result-1")

    torch.save({"input": torch.ones(3, 2)}, root / "x.pt")
    driven(root, drive, "--run-code")


@pytest.mark.slow
def test_a_call_that_takes_too_long_ends(root: Path) -> None:
    (root / "slow.py").write_text("import time\ntime.sleep(600)\n")

    async def drive(session: Any) -> None:
        answer = await session.call_tool("check", {"baseline": "slow.py:net"})
        assert answer.is_error and "took too long" in text_of(answer)

    driven(root, drive, "--run-code", "--timeout", "1")


def test_stdout_belongs_to_the_protocol(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", str(root), "--json"]) == 2
    assert main(["mcp", str(root / "one.pt")]) == 2
    assert "not a directory to serve" in capsys.readouterr().err
