"""`glass mcp`: an MCP server on stdin and stdout, through which a coding agent checks, compares, shows and explains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glassengine.cli.options import settings
from glassengine.cli.roots import Roots
from glassengine.errors import UsageError


def command(
    roots: Annotated[
        list[str],
        typer.Argument(metavar="ROOT...", help="Directories that may be read; nothing else is.", show_default=False),
    ],
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Let clients run file.py:factory below the roots.")
    ] = False,
    timeout: Annotated[int, typer.Option(metavar="SECONDS", min=1, help="Longest time of one call.")] = 600,
) -> int:
    """Serve check, compare, show and explain to a coding agent (MCP, on stdin and stdout)."""
    if settings.json is not None:
        raise UsageError("stdout belongs to the protocol", got="--json")
    allowed = Roots([Path(root) for root in roots], run_code=run_code)
    try:
        import mcp.server.mcpserver  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the package mcp is missing, or too old",
            got=str(error),
            expected="the official SDK, version 2 or newer",
            hint="pip install 'glassengine[mcp]'",
        ) from error
    from glassengine.cli.mcp_server import serve

    serve(allowed, timeout)
    return 0
