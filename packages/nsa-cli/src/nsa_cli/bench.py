"""`nsa bench`: time combinations of backends against dense attention; compare result files."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import bench_options as options
from nsa_cli import output
from nsa_cli.choices import (
    Device,
    Force,
    Json,
    Threads,
    advanced,
    as_options,
    block_sizes,
    dtype_names,
    options_on_command_line,
    pairs_of_backends,
    pick_device,
    read_file,
    read_text,
    refuse_options,
    some_of,
    split_commas,
)
from nsa_cli.commands import App
from nsa_cli.extras import need_extras
from nsa_cli.result_files import ResultFiles
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.util.interruption import Interruption, deferred_signals, exit_code

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_bench.render.format import Rows
    from nsa_bench.result import Result
    from nsa_bench.run import Bench
    from nsa_bench.settings import Settings

_HELP = """Time combinations of backends against dense attention: the whole call and each branch.

The timed call takes q, k, v and gates and returns o: mean compression, selection, three branches
and the gated sum. Each combination is checked against the float64 oracle before it is timed. A
combination that fails has no figures, and the exit code is 1; so it is if none could be timed.
"""
_MODULE_OF_RIVAL = {"fla": "fla", "sfnsa": "flash_nsa", "xunhao": "native_sparse_attention"}
app = App(help=_HELP)


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
    batch: Annotated[int, advanced(help="Sequences per batch.", min=1)] = 1,
    inputs: options.Inputs = "random",
    text: options.Text = None,
    checkpoint: options.Checkpoints = None,
    device: Device = "auto",
    threads: Threads = 1,
    budget: options.Budget = None,
    max_call: options.MaxCall = 5.0,
    cell_limit: options.CellLimit = 60.0,
    time_limit: options.TimeLimit = None,
    json: Json = None,
    html: options.Html = None,
    png: options.Png = None,
    svg: options.Svg = None,
    force: Force = False,
    seed: Annotated[int, advanced(help="Seed of all random inputs.")] = 0,
) -> None:
    """Run the benchmark; options that are not given take the preset's values for this device."""
    typed = options_on_command_line(context)
    if context.invoked_subcommand is not None:
        if typed:
            names, after = as_options(sorted(typed)), context.invoked_subcommand
            message = f"{names}: not before {after}; give the options of nsa bench {after} after it"
            output.end(output.USAGE, message)
        return
    overrides = {"shapes": shape, "lengths": length, "phases": phase, "dtypes": dtype}
    with deferred_signals() as stop:
        files = _Files(json, html, png, svg, force)
        files.check()
        settings = _settings(
            preset,
            overrides,
            combo or [],
            block_sizes(blocks),
            device,
            {
                "batch": batch,
                "seed": seed,
                "rivals": rival,
                "max_call_s": max_call,
                "cell_limit_s": cell_limit,
                **_limits(preset, budget, time_limit),
            },
            inputs,
            text,
            checkpoint or [],
            threads,
        )
        _prepare_quick_end()
        output.import_with_plugins("nsa_bench.prefill")
        from nsa_bench.prefill import PrefillBench

        benchmark = PrefillBench(settings, output.find_backends(), output.environment())
        raise typer.Exit(_run(benchmark, stop, files))


@app.command()
def decode(
    combo: options.Combos = None,
    preset: options.Preset = "quick",
    shape: options.Shapes = None,
    length: options.CacheLengths = None,
    batch: options.DecodeBatch = None,
    page_size: options.PageSize = None,
    dtype: options.Dtypes = None,
    blocks: options.Blocks = "32,16,64,16,512",
    device: Device = "auto",
    threads: Threads = 1,
    budget: options.Budget = None,
    cell_limit: options.CellLimit = 60.0,
    time_limit: options.TimeLimit = None,
    json: Json = None,
    html: options.Html = None,
    png: options.Png = None,
    svg: options.Svg = None,
    force: Force = False,
    seed: Annotated[int, advanced(help="Seed of all random inputs.")] = 0,
) -> None:
    """Time steps of decoding: each step, its slots, a whole layer, and dense attention.

    Without --shape and --length, the cells of this device are timed: large caches on a GPU, small
    ones on the CPU.
    """
    with deferred_signals() as stop:
        files = _Files(json, html, png, svg, force)
        files.check()
        from nsa_cli import bench_decode

        settings = bench_decode.settings(
            bench_decode.cells(shape, length, batch, page_size),
            combo or [],
            dtype,
            device,
            threads,
            {
                "blocks": block_sizes(blocks),
                "seed": seed,
                "cell_limit_s": cell_limit,
                **_limits(preset, budget, time_limit),
            },
        )
        _prepare_quick_end()
        output.import_with_plugins("nsa_bench.decode")
        from nsa_bench.decode import DecodeBench

        benchmark = DecodeBench(settings, output.find_backends(), output.environment())
        raise typer.Exit(_run(benchmark, stop, files))


def _limits(preset: str, budget: float | None, time_limit: float | None) -> dict[str, float]:
    """Return the seconds of a figure and of the run; None takes the preset's value."""
    return {
        "budget_s": options.BUDGET_S[preset] if budget is None else budget,
        "time_limit_s": options.TIME_LIMIT_S[preset] if time_limit is None else time_limit,
    }


@app.command("compare")
def compare_files(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Baseline result file.")],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="Result file to compare with the baseline.")
    ],
    fail_over: Annotated[
        str, typer.Option(metavar="PERCENT", help="Tolerated slow-down in percent.")
    ] = "5%",
    force: Annotated[
        bool, typer.Option("--force", help="Compare results from different devices.")
    ] = False,
    allow_missing: options.AllowMissing = False,
) -> None:
    """Compare two result files.

    Exit code 1 if a figure of the baseline is missing in the new file, or slower by more than
    --fail-over and by more than the noise.
    """
    from nsa_bench.compare import compare, regressed
    from nsa_bench.render.tables import changes_tables
    from nsa_bench.result import read_result

    before, after = read_result(old), read_result(new)
    changes = compare(before, after, fail_over=_percentage(fail_over), force=force)
    has_regressed = regressed(changes, allow_missing)
    console = output.console()
    named = [c for c in changes if c.verdict not in ("same", "new")]
    for rows in changes_tables(named):
        _print_table(console, rows)
    for file, interrupted in ((old, before.interrupted), (new, after.interrupted)):
        if interrupted is not None:
            output.print_text(
                console,
                f"{file} was interrupted: {interrupted.cells_left} of {interrupted.cells} cells"
                " left",
                "yellow",
            )
    counts = {
        verdict: sum(change.verdict == verdict for change in changes)
        for verdict in ("slower", "lost", "missing", "faster", "gained", "same", "new")
    }
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    if counts["missing"] and not allow_missing:
        output.print_text(
            console,
            f"{counts['missing']} figures of {old} are missing in {new}; measure them, or give"
            " --allow-missing",
            "yellow",
        )
    style = "bold red" if has_regressed else "bold green"
    output.print_text(console, f"{len(changes)} figures: {summary}", style)
    raise typer.Exit(output.FAILED if has_regressed else 0)


@app.command()
def report(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Result file written by nsa bench --json.")
    ],
    html: options.Html = None,
    png: options.Png = None,
    svg: options.Svg = None,
    force: Force = False,
) -> None:
    """Print a result file and write its HTML report or plots.

    Exit code 1 if a combination in the file failed its check, or none was timed.
    """
    from nsa_bench.result import read_result

    files = _Files(None, html, png, svg, force)
    files.check()
    result = read_result(file)
    files.write(result, _verdict(result))
    raise typer.Exit(_verdict(result))


@dataclasses.dataclass(frozen=True)
class _Files:
    """The files of a result; None: not written."""

    json: Path | None
    html: Path | None
    png: Path | None
    svg: Path | None
    force: bool

    def check(self) -> None:
        """Check before any work that the files can be written."""
        kinds = ("json", "html", "png", "svg")
        output.check_files({f"--{kind}": getattr(self, kind) for kind in kinds}, self.force)
        if self.html or self.png or self.svg:
            need_extras("nsa bench", ["matplotlib", "jinja2"])

    def write(self, result: Result, code: int) -> None:
        """Write the files, then print the result.

        If a file cannot be written, this ends the command with ``code``, or 5 if it is 0.
        """

        def write_page(file: Path) -> None:
            from nsa_bench.render.page import page

            output.write_atomic(file, page(result), self.force)

        def write_plot(file: Path, kind: str) -> None:
            from nsa_bench.render.plots import save

            save(result, file, kind, self.force)

        files = ResultFiles()
        text = result.to_json()
        files.write_json(self.json, text, self.force)
        files.write(self.html, write_page)
        files.write(self.png, lambda f: write_plot(f, "png"))
        files.write(self.svg, lambda f: write_plot(f, "svg"))
        if self.json != output.STDOUT:
            _print_result(result)
        if names := ", ".join(map(str, files.written)):
            output.print_text(output.console(), f"Written to {names}")
        files.exit_code(code)


def _verdict(result: Result) -> int:
    """Return 1 if a check failed or nothing was timed, else 0."""
    return output.FAILED if result.failed or result.timed_nothing else 0


def _prepare_quick_end() -> None:
    """Let the command end soon after a signal: load now what prints and writes the result."""
    import rich.console
    import rich.table  # noqa: F401

    import nsa_bench.render.summary
    import nsa_bench.render.tables  # noqa: F401

    atexit.register(gc.freeze)  # Python's last collection over torch's objects takes a second


def _percentage(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidInput(f"--fail-over must be a percentage such as 5%, got {text!r}")
    return value


def _settings(
    preset: str,
    overrides: dict[str, str | None],
    combos: Sequence[str],
    blocks: tuple[int, ...],
    device: str,
    numbers: dict[str, Any],
    inputs: str,
    text: Path | None,
    checkpoints: Sequence[Path],
    threads: int,
) -> Settings:
    """Return the settings; options are checked before torch is imported."""
    from nsa_bench.settings import Settings
    from nsa_bench.shapes import parse_lengths, parse_shape

    parsers: dict[str, Callable[[str], Any]] = {
        "shapes": lambda words: [parse_shape(word) for word in split_commas(words) or [words]],
        "lengths": parse_lengths,
        "phases": lambda words: some_of("--phase", words, ("forward", "backward", "both")),
        "dtypes": dtype_names,
    }
    if "decode" in split_commas(overrides["phases"] or ""):
        output.end(output.USAGE, "--phase decode: nsa bench decode times steps of decoding")
    values = {name: parsers[name](words) for name, words in overrides.items() if words is not None}
    with output.naming("--blocks:"):
        for shape in values.get("shapes", [parse_shape("reports")]):
            shape.config(blocks)
    if numbers["rivals"]:
        numbers["rivals"] = _named_rivals(numbers["rivals"])
    for combo in combos:
        pairs_of_backends(combo, "--combo")
    input_kinds = some_of("--inputs", inputs, ("random", "real"))
    if "real" not in input_kinds:
        files = ["text"] * (text is not None) + ["checkpoint"] * bool(checkpoints)
        refuse_options(files, "only with --inputs real")
    if text is not None:
        read_file("--text", text)
    for path in checkpoints:
        read_file("--checkpoint", path)
    torch_device = pick_device(device, threads)
    from nsa_verify.problems.combination import parse_combination

    defaults = options.PRESETS[preset]["cuda" if torch_device.startswith("cuda") else "cpu"]
    values = {name: parsers[name](words) for name, words in defaults.items()} | values
    name, content = "", b""
    if "real" in input_kinds:
        name, content = read_text(text, numbers["batch"] * max(values["lengths"]))
    return Settings(
        **values,
        inputs=input_kinds,
        combos=[parse_combination(word) for word in combos],
        blocks=blocks,
        device=torch_device,
        text=content,
        text_name=name,
        checkpoints=checkpoints,
        **numbers,
    )


def _named_rivals(values: Sequence[str]) -> list[str]:
    """Return the libraries that the values of --rival name.

    Raises:
        InvalidInput: A value names another library, or "none" beside a library.
        BackendUnavailable: A library is not installed.
    """
    allowed = (*_MODULE_OF_RIVAL, "none")
    names = [name for value in values for name in some_of("--rival", value, allowed)]
    if {*names} == {"none"}:
        return []
    if "none" in names:
        raise InvalidInput(f"--rival none excludes other libraries, got {', '.join(names)}")
    for name in names:
        if importlib.util.find_spec(_MODULE_OF_RIVAL[name]) is None:
            raise BackendUnavailable(
                f"--rival {name}: its package, which has the module {_MODULE_OF_RIVAL[name]},"
                " is not installed"
            )
    return names


def _run(bench: Bench, stop: Interruption, files: _Files) -> int:
    """Run the benchmark, write its files and return the exit code: of a signal, or the verdict."""
    with output.progress(bench.steps()) as advance:
        result = bench.run(advance, stop)
    code = _verdict(result) if (end := result.interrupted) is None else exit_code(end.signal)
    files.write(result, code)
    return code


def _print_result(result: Result) -> None:
    from nsa_bench.render.summary import summary
    from nsa_bench.render.tables import tables

    console = output.console()
    for rows in tables(result):
        _print_table(console, rows)
    for style, line in summary(result):
        output.print_text(console, line, style)


def _print_table(console: Console, rows: Rows) -> None:
    """Print a table; one that is wider than the screen is printed as several."""
    from nsa_bench.render.arrange import arrange

    for title, columns, cells in arrange(rows, output.table_width()):
        wrapped = ("combination", "backends", "correct", "subject", "note")
        output.print_table(console, columns, cells, title, wrapped)
        console.print()
