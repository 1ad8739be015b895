# SPDX-License-Identifier: Apache-2.0
"""An assistant's client calls the tools, and checks their results against the schemas that the server declares."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import opacus_memprof
from opacus_memprof.cli import app
from opacus_memprof.cli.look import call_tool_by_name
from opacus_memprof.errors import MemprofError
from tests.warm_python import ENVIRONMENT

TRAINING = """
import sys
import torch

model = torch.nn.Linear(1024, int(sys.argv[1])).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(8, 1024).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_client_calls_the_tools(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp")
    import torch
    from mcp.client.stdio import StdioServerParameters, stdio_client

    for width in (64, 128):
        with opacus_memprof.profile(tmp_path / str(width), device="cpu"):
            torch.empty(width * 1024, dtype=torch.uint8)
    (tmp_path / "train.py").write_text(TRAINING)
    program = StdioServerParameters(
        command=sys.executable, args=["-m", "opacus_memprof", "mcp"], env=dict(ENVIRONMENT), cwd=str(tmp_path)
    )

    async def ask() -> tuple[list[str], list[Any]]:
        async with stdio_client(program) as streams, mcp.ClientSession(*streams) as session:
            await session.initialize()
            names = [tool.name for tool in (await session.list_tools()).tools]
            calls = [
                ("report", {"directory": "64"}),
                ("diff", {"before": "64", "after": "128"}),
                ("plan", {"script": "train.py", "arguments": "4096"}),
                ("report", {"directory": "nowhere"}),
                ("plan", {"script": "nowhere.py"}),
                ("report", {}),
            ]
            return names, [await session.call_tool(name, arguments) for name, arguments in calls]

    names, (reported, compared, planned, *failed) = asyncio.run(ask())
    assert names == ["report", "diff", "plan"]
    assert reported.structured_content["devices"]["cpu"]["peak"]["requested_bytes"] == 64 * 1024
    assert compared.structured_content["devices"]["cpu"]["total"] == 64 * 1024
    verdict = planned.structured_content["verdict"]
    assert (verdict["gpu"], verdict["fits"]) == ("h100", True)
    assert verdict["run"]["requested_bytes"] >= 2 * 4 * 4096 * 1025  # weights and gradients
    assert [result.is_error for result in failed] == [True, True, True]
    assert "nowhere" in failed[0].content[0].text
    assert failed[1].content[0].text == "the script nowhere.py does not exist"


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.types", None)
    result = CliRunner().invoke(app, ["mcp"])
    assert "tools of assistants need mcp, which cannot be imported (" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("nope", {}, "there is no tool 'nope': use one of report, diff, plan"),
        ("report", {}, "report takes strings for directory: correct directory"),
        ("report", {"directory": 5}, "report takes strings for directory: correct directory"),
        ("diff", {"before": "a", "after": "b", "more": "c"}, "diff takes strings for before, after: correct more"),
        ("plan", {"script": "--help"}, "the script --help does not exist"),
    ],
)
def test_wrong_calls_are_refused(name: str, arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(MemprofError) as refused:
        call_tool_by_name(name, arguments)
    assert str(refused.value) == sentence
