"""`nsa bench`: time combinations of backends against dense attention, compare results, and report
on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import bench_options as options
from nsa_cli import output
from nsa_cli.choices import block_sizes, dtype_names, options_said, pick_device, spelt, words
from nsa_core.util.interruption import Interruption, exit_code, held

if TYPE_CHECKING:
    from rich.table import Table

    from nsa_bench.render.format import Rows
    from nsa_bench.result import Result
    from nsa_bench.run import Settings

_HELP = """Time combinations of backends, each branch and the whole, against dense attention in the
same run.

Core: mean compression, three branches, selection and gates; q, k, v and gates in, o out.
Correctness first: a combination is judged against the float64 truth before it is timed; one that
fails has no figure, and exit code 1.
"""
app = typer.Typer(help=_HELP, rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    combo: options.Combos = None,
    rival: options.Rivals = None,
    preset: options.Preset = "quick",
    shape: options.Shapes = None,
    length: options.Lengths = None,
    phase: options.Phases = None,
    dtype: options.Dtypes = None,
    blocks: options.Blocks = "32,16,64,16,512",
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    page_size: options.PageSize = None,
    inputs: options.Inputs = "random",
    text: options.Text = None,
    checkpoint: options.Checkpoints = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    budget: options.Budget = None,
    max_call: options.MaxCall = 5.0,
    cell_limit: options.CellLimit = 60.0,
    time_limit: options.TimeLimit = None,
    json_file: options.Json = None,
    html: options.Html = None,
    png: options.Png = None,
    svg: options.Svg = None,
    force: options.Force = False,
    seed: Annotated[int, typer.Option(help="Seed of every random input.")] = 0,
) -> None:
    """Run the bench; the options that are left out are the preset's for this device."""
    if context.invoked_subcommand is not None:
        return
    given = {"shapes": shape, "lengths": length, "phases": phase, "dtypes": dtype}
    decode = words(phase or "") == ["decode"]
    with output.exit_codes(), held() as stop:
        _check_outputs([json_file, html, png, svg], html or png or svg, force)
        _check(preset, decode, options_said(context))
        quick = {
            "budget_s": options.BUDGET_S.get(preset),
            "time_limit_s": options.TIME_LIMIT_S.get(preset),
        }
        limits = {"budget_s": budget, "time_limit_s": time_limit}
        if decode:
            from nsa_cli import bench_decode

            cells = bench_decode.cells(shape, length, batch, page_size)
            how = (combo or [], dtype, block_sizes(blocks), device, threads, seed)
            result = bench_decode.run(cells, *how, limits, preset, cell_limit, stop)
        else:
            settings = _settings(
                preset,
                given,
                combo or [],
                block_sizes(blocks),
                device,
                {
                    "batch": batch,
                    "seed": seed,
                    "rivals": rival,
                    "max_call_s": max_call,
                    "cell_limit_s": cell_limit,
                }
                | {
                    name: default if limits[name] is None else limits[name]
                    for name, default in quick.items()
                },
                inputs,
                text,
                checkpoint or [],
                threads,
            )
            result = _run(settings, stop)
        _write(result, json_file, html, png, svg, force)
        _print(result)
    raise typer.Exit(_code(result))


@app.command("compare")
def compare_files(
    old: Annotated[Path, typer.Argument(help="Result file to compare with.")],
    new: Annotated[Path, typer.Argument(help="Result file to judge.")],
    fail_over: Annotated[str, typer.Option(help="Tolerated slow-down.")] = "5%",
    force: Annotated[
        bool, typer.Option("--force", help="Compare results of different devices.")
    ] = False,
) -> None:
    """Compare two result files. Exit code 1: something is slower beyond --fail-over and beyond the
    noise, or lost.
    """
    with output.exit_codes():
        from nsa_bench.compare import compare, regressed
        from nsa_bench.render.tables import changes_rows
        from nsa_bench.result import read_result

        before, after = read_result(old), read_result(new)
        changes = compare(before, after, fail_over=_percentage(fail_over), force=force)
        bad = regressed(changes)
        console = output.console()
        console.print(_table(changes_rows([c for c in changes if c.verdict != "same"])))
        for file, cut in ((old, before.interrupted), (new, after.interrupted)):
            if cut is not None:
                console.print(
                    f"{file} was interrupted: {cut.cells_left} of {cut.cells} cells left",
                    style="yellow",
                )
        counts = {
            v: sum(c.verdict == v for c in changes)
            for v in ("slower", "lost", "faster", "same", "missing")
        }
        line = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        console.print(f"{len(changes)} figures: {line}", style="bold red" if bad else "bold green")
    raise typer.Exit(output.FAILED if bad else 0)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="Result file of nsa bench --json.")],
    html: options.Html = None,
    png: options.Png = None,
    svg: options.Svg = None,
    force: options.Force = False,
) -> None:
    """Print a result file, and write its report or plots. Exit code 1 where a combination had
    failed.
    """
    with output.exit_codes():
        from nsa_bench.result import read_result

        _check_outputs([html, png, svg], html or png or svg, force)
        result = read_result(file)
        _write(result, None, html, png, svg, force)
        _print(result)
    raise typer.Exit(output.FAILED if result.failed else 0)


def _code(result: Result) -> int:
    if result.interrupted is not None:
        return exit_code(result.interrupted.signal)
    return output.FAILED if result.failed else 0


def _check_outputs(files: Sequence[Path | None], plotted: Path | None, force: bool) -> None:
    for file in files:
        output.check_writable(file, force)
    if plotted is not None:
        from nsa_bench.render.style import need_matplotlib

        need_matplotlib()


def _check(preset: str, decode: bool, said: set[str]) -> None:
    """Refuse an unknown preset, and options that a run of this phase would pass over."""
    from nsa_core.errors import InvalidInput

    if preset not in options.PRESETS:
        raise InvalidInput(f"--preset must be one of {', '.join(options.PRESETS)}, got {preset!r}")
    if over := [name for name in options.PREFILL if decode and name in said]:
        raise InvalidInput(f"{spelt(over)}: not for --phase decode; leave it out")
    if over := [
        name
        for name in ("batch", "page_size")
        if decode and name in said and not {"shape", "length"} & said
    ]:
        raise InvalidInput(
            f"{spelt(over)}: give --shape or --length with it; the device's own cells have theirs"
        )
    if "page_size" in said and not decode:
        raise InvalidInput("--page-size is for --phase decode; leave it out")


def _percentage(text: str) -> float:
    from nsa_core.errors import InvalidInput

    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidInput(f"--fail-over must be a percentage such as 5%, got {text!r}")
    return value


def _settings(
    preset: str,
    given: dict[str, str | None],
    combos: Sequence[str],
    blocks: tuple[int, ...],
    device: str,
    numbers: dict[str, Any],
    inputs: str,
    text: Path | None,
    checkpoints: Sequence[Path],
    threads: int,
) -> Settings:
    place = pick_device(device, threads)
    chosen = {n: v for n, v in given.items() if v is not None}
    of = options.PRESETS[preset]["cuda" if place.startswith("cuda") else "cpu"] | chosen
    from nsa_bench.run import Settings
    from nsa_bench.shapes import parse_lengths, parse_shape
    from nsa_verify.combination import parse_combination

    kinds, lengths = words(inputs), parse_lengths(of["lengths"])
    name, content = _text(text, numbers["batch"] * max(lengths)) if "real" in kinds else ("", b"")
    return Settings(
        shapes=[parse_shape(word) for word in words(of["shapes"])],
        lengths=lengths,
        phases=words(of["phases"]),
        dtypes=dtype_names(of["dtypes"]),
        inputs=kinds,
        combos=[parse_combination(word) for word in combos],
        blocks=blocks,
        device=place,
        text=content,
        text_name=name,
        checkpoints=checkpoints,
        **numbers,
    )


def _text(path: Path | None, at_least: int) -> tuple[str, bytes]:
    """(name, bytes) behind real inputs: the given file, or the documentation inside this Python."""
    from nsa_cli.verify import read_text

    if path is not None:
        return read_text(path)
    import platform

    from nsa_bench.python_docs import library_text

    return f"documentation of Python {platform.python_version()}", library_text(at_least)


def _run(settings: Settings, stop: Interruption) -> Result:
    from nsa_bench.run import Bench

    run = Bench(settings, output.find_backends(), output.environment())
    total = len(run.cells()) + len(settings.shapes) * len(settings.dtypes)
    with output.progress(total) as advance:
        return run.run(advance, stop)


def _write(
    result: Result,
    json_file: Path | None,
    html: Path | None,
    png: Path | None,
    svg: Path | None,
    force: bool,
) -> None:
    if json_file is not None:
        output.write_atomic(json_file, result.to_json(), force)
    if html is not None:
        from nsa_bench.render.page import page

        output.write_atomic(html, page(result), force)
    for file, kind in ((png, "png"), (svg, "svg")):
        if file is not None:
            from nsa_bench.render.plots import save

            save(result, file, kind, force)


def _print(result: Result) -> None:
    from nsa_bench.render.summary import summary
    from nsa_bench.render.tables import tables

    console = output.console()
    for rows in tables(result):
        console.print(_table(rows))
        console.print()
    for style, line in summary(result):
        console.print(line, style=style)


def _table(rows: Rows) -> Table:
    title, columns, cells = rows
    table = output.plain_table(*columns)
    table.title, table.title_justify = title or None, "left"
    for cell in cells:
        table.add_row(*cell)
    return table
