# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof report`, `merge`, `mcp`, `diff` and `tax`: look at a profile or a job, and compare two."""

import inspect
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from typer.core import TyperCommand

from opacus_memprof.errors import MemprofError, require
from opacus_memprof.language import tr
from opacus_memprof.profiles.difference import Diff
from opacus_memprof.profiles.directory import DEFAULT_DIRECTORY, PLAN, RANKS, gather
from opacus_memprof.profiles.json_object import JsonObject, read_json_object, schema_of
from opacus_memprof.profiles.plan import Plan
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.versions import VERSION

_PROFILE = "Directory of the profile, or file of torch.cuda.memory._dump_snapshot."
_BY_DEFAULT = ""  # an option without a file
# Copied from reports.export, which is not imported here because it loads many modules.
_SUFFIXES = {
    "--html": (".html",),
    "--png": (".png",),
    "--csv": (".csv",),
    "--json": (".json",),
    "--latex": (".tex",),
    "--perfetto": (".pftrace", ".perfetto-trace"),
    "--memory-viz": (".pickle", ".pkl"),
    "--parquet": (".parquet",),
}


class ReportCommand(TyperCommand):
    """A command whose format options have an optional value.

    The next argument is the option's file only if it has one of the suffixes of the format.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completed = []
        for argument, following in pairwise([*args, ""]):
            suffixes = _SUFFIXES.get(argument.replace("_", "-"))
            alone = suffixes is not None and not following.endswith(suffixes)
            completed.append(f"{argument}={_BY_DEFAULT}" if alone else argument)
        return super().parse_args(ctx, completed)


def _file(option: str, help: str) -> Any:
    return typer.Option(option, metavar=f"[FILE{_SUFFIXES[option][0]}]", help=help, show_default=False)


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR|FILE", help=_PROFILE)],
    html: Annotated[str | None, _file("--html", "HTML page: timeline, peak, modules, findings.")] = None,
    png: Annotated[str | None, _file("--png", "Picture, and the same for dark pages as FILE-dark.png.")] = None,
    csv: Annotated[str | None, _file("--csv", "Bytes by category at the peak, and by module, phase, step.")] = None,
    json: Annotated[str | None, _file("--json", "Content of profile.json.")] = None,
    latex: Annotated[str | None, _file("--latex", "LaTeX tables, for booktabs.")] = None,
    perfetto: Annotated[str | None, _file("--perfetto", "Trace for ui.perfetto.dev.")] = None,
    memory_viz: Annotated[str | None, _file("--memory-viz", "Snapshot for pytorch.org/memory_viz.")] = None,
    parquet: Annotated[str | None, _file("--parquet", "All events, for pandas, polars and duckdb.")] = None,
    vanilla: Annotated[
        Path | None,
        typer.Option(help="Profile of the same training without Opacus; adds the cost of privacy to --html."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print all tables, and evidence of findings.")] = False,
) -> None:
    """Print where the memory went, from a profile. If the process was killed, reads its events instead.

    Each option writes a file: the one that follows it, or memprof.html, memprof.png … in DIRECTORY. For a job of
    several ranks, DIRECTORY shows all ranks, and DIRECTORY/rank_0 one. The profile of a snapshot of torch, FILE.pickle,
    is written into FILE.memprof.
    """
    from opacus_memprof.analysis.job_view import JobView, load_view
    from opacus_memprof.analysis.torch_snapshot import profile_of
    from opacus_memprof.reports.summary import print_summary
    from opacus_memprof.reports.text import print_report

    given = {"html": html, "png": png, "csv": csv, "json": json, "latex": latex, "perfetto": perfetto}
    given |= {"memory_viz": memory_viz, "parquet": parquet}
    wanted = {name: file or None for name, file in given.items() if file is not None}
    if vanilla and html is None:
        raise MemprofError("--vanilla is for the page: add --html")
    directory = profile_of(directory)
    view = load_view(directory, vanilla, whole="html" in wanted)
    if isinstance(view, JobView) and (wanted.keys() - {"html"} or vanilla):
        raise MemprofError(
            f"{directory} holds the {len(view.summary.ranks)} ranks of a job, for which only a page can be written: "
            f"use --html, or give one, as {directory / 'rank_0'}"
        )
    console = Console()
    (print_report if full else print_summary)(view, console)
    if wanted:
        from opacus_memprof.reports.export import export

        console.print()
        for path in export(view, wanted):
            console.print(tr("wrote {path}", path=path), highlight=False, markup=False, soft_wrap=True)


def merge(
    sources: Annotated[
        list[str], typer.Argument(metavar="DIR|URL...", help="Where ranks of the job are.", show_default=False)
    ],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="DIR|URL", help="Where all ranks go.")
    ] = DEFAULT_DIRECTORY,
) -> None:
    """Gather the ranks of a job whose machines have no common disk, and print the summary of all.

    Each machine copies its ranks to an address that fsspec knows, and then one command merges them:
    `merge DIR -o s3://bucket/job` on each, `merge s3://bucket/job -o DIR` on yours.
    """
    from opacus_memprof.analysis.job import load_ranks
    from opacus_memprof.analysis.job_view import view_job
    from opacus_memprof.profiles.files import write_text
    from opacus_memprof.profiles.json_object import to_json
    from opacus_memprof.reports.summary import print_summary

    gather(sources, output)
    if "://" in output:
        typer.echo(tr("copied the ranks of {sources} to {output}", sources=", ".join(sources), output=output))
        return
    summary = load_ranks(output)
    write_text(Path(output, RANKS), to_json(summary))
    print_summary(view_job(summary, output), Console())


def diff(
    before: Annotated[Path, typer.Argument(help="Profile of the run to compare with.")],
    after: Annotated[Path | None, typer.Argument(help="Profile of the changed run.", show_default=False)] = None,
    vanilla: Annotated[
        Path | None,
        typer.Option(help="Profile of the same run without privacy; prints what privacy costs, like `tax`."),
    ] = None,
    fail_above: Annotated[
        str | None,
        typer.Option(metavar="2%|50MiB", help="Exit with 1 if the peak of a device grew by more.", show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
) -> None:
    """Print what changed from BEFORE to AFTER, at the peak and in each phase, by category and module.

    Each is the directory of a profile, or a file of torch.cuda.memory._dump_snapshot.
    """
    from opacus_memprof.analysis.diff import GrowthLimit, diff_profiles, exceeded_limits
    from opacus_memprof.analysis.profile import load_profile
    from opacus_memprof.analysis.torch_snapshot import profile_of
    from opacus_memprof.reports.diff import diff_markdown, print_diff

    if vanilla is not None:
        if after is not None or fail_above is not None or markdown:
            raise MemprofError("--vanilla DIR goes with one profile and no other option: diff --vanilla DIR PRIVATE")
        tax(before, vanilla)
        return
    if after is None:
        raise MemprofError("give two profiles, BEFORE and AFTER, or --vanilla DIR and the private one")
    limit = None if fail_above is None else GrowthLimit.parse(fail_above)
    result = diff_profiles(load_profile(profile_of(before)), load_profile(profile_of(after)))
    beyond = exceeded_limits(result, limit) if limit else []
    if markdown:
        typer.echo(diff_markdown(result, beyond), nl=False)
    else:
        print_diff(result, Console(), beyond)
    if beyond:
        raise typer.Exit(1)


def _report_tool(directory: str) -> Profile:
    """Where the memory of a recorded training went: the peak of each device by category and module, phases, findings.

    `directory` is that of a profile, or a file of torch.cuda.memory._dump_snapshot.
    """
    from opacus_memprof.analysis.profile import load_profile
    from opacus_memprof.analysis.torch_snapshot import profile_of

    return load_profile(profile_of(directory))


def _diff_tool(before: str, after: str) -> Diff:
    """What changed between two profiles, at the peak and in each phase. Both are as `report` takes them."""
    from opacus_memprof.analysis.diff import diff_profiles

    return diff_profiles(_report_tool(before), _report_tool(after))


def _plan_tool(script: str, arguments: str = "", gpu: str = "h100") -> Plan:
    """Whether a training script fits on a GPU, and what would make it fit, by running it on a virtual GPU.

    `script` is run as a program, with `arguments`, of which each is a line. The run needs no GPU, and takes as long as
    the script's steps on a CPU. `gpu` is a kind such as h100 or a100-40.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "opacus_memprof", "plan", "--gpu", gpu, "-o", directory, "--", script]
        ran = subprocess.run(
            [*command, *arguments.splitlines()], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        file = Path(directory, PLAN)
        if not file.exists():
            raise MemprofError(ran.stderr.strip().rpartition("\n")[2].removeprefix("opacus-memprof: "))
        return read_json_object(file, Plan)


_TOOLS: dict[str, tuple[Any, type[JsonObject]]] = {
    "report": (_report_tool, Profile),
    "diff": (_diff_tool, Diff),
    "plan": (_plan_tool, Plan),
}


def _declared(name: str) -> dict[str, Any]:
    function, result = _TOOLS[name]
    parameters = inspect.signature(function).parameters.values()
    given = {
        "type": "object",
        "properties": {each.name: {"type": "string"} for each in parameters},
        "required": [each.name for each in parameters if each.default is each.empty],
    }
    returned = {"type": "object", **schema_of(result)}
    return {"name": name, "description": function.__doc__, "input_schema": given, "output_schema": returned}


def call_tool_by_name(name: str, arguments: dict[str, Any]) -> JsonObject:
    """Returns the result of a tool for an assistant.

    Raises:
        MemprofError: there is no such tool, or it does not take these arguments, or it raises one.
    """
    if name not in _TOOLS:
        raise MemprofError(f"there is no tool {name!r}: use one of {', '.join(_TOOLS)}")
    declared = _declared(name)["input_schema"]
    wrong = [each for each in declared["required"] if each not in arguments]
    wrong += [each for each, value in arguments.items() if each not in declared["properties"] or type(value) is not str]
    if wrong:
        raise MemprofError(f"{name} takes strings for {', '.join(declared['properties'])}: correct {', '.join(wrong)}")
    result: JsonObject = _TOOLS[name][0](**arguments)
    return result


def mcp() -> None:
    """Serve report, diff and plan to an assistant, by the Model Context Protocol on standard input and output."""
    import asyncio  # no other command needs it

    types, stdio = require("mcp.types", "tools of assistants"), require("mcp.server.stdio", "tools of assistants")
    lowlevel = require("mcp.server.lowlevel", "tools of assistants")

    async def list_tools(context: Any, parameters: Any) -> Any:
        return types.ListToolsResult(tools=[types.Tool(**_declared(name)) for name in _TOOLS])

    async def call_tool(context: Any, parameters: Any) -> Any:
        try:
            result = await asyncio.to_thread(call_tool_by_name, parameters.name, parameters.arguments or {})
        except MemprofError as error:
            return types.CallToolResult(content=[types.TextContent(text=str(error))], is_error=True)
        text = types.TextContent(text=msgspec.json.encode(result).decode())
        return types.CallToolResult(content=[text], structured_content=msgspec.to_builtins(result))

    async def serve() -> None:
        server = lowlevel.Server("opacus-memprof", version=VERSION, on_list_tools=list_tools, on_call_tool=call_tool)
        async with stdio.stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    asyncio.run(serve())


def tax(
    private: Annotated[Path, typer.Argument(help="Profile of the training with Opacus.")],
    vanilla: Annotated[Path, typer.Argument(help="Profile of the same model and batch without Opacus.")],
) -> None:
    """Print what privacy costs at the peak: the difference of two profiles, by category and module."""
    from opacus_memprof.analysis.diff import dp_tax
    from opacus_memprof.analysis.profile import load_profile
    from opacus_memprof.reports.diff import print_tax

    print_tax(dp_tax(load_profile(private), load_profile(vanilla)), Console())
