"""`nsa tune`: time the ready backends of each slot, so that `auto` picks the fastest."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_cli import output
from nsa_cli.bench_options import Blocks
from nsa_cli.choices import (
    DTYPE_CHOICES,
    SHAPE,
    Device,
    Threads,
    block_sizes,
    completion,
    one_dtype,
    options_on_command_line,
    pick_device,
    refuse_options,
    tokens,
)
from nsa_cli.result_files import ResultFiles
from nsa_core.errors import InvalidInput
from nsa_core.plan import tuned
from nsa_core.util.atomic_files import writing

if TYPE_CHECKING:
    from nsa_bench.tune import Tuning
    from nsa_core.plan.tuned import Record


def tune(
    context: typer.Context,
    shape: Annotated[
        str,
        typer.Option(
            metavar=SHAPE,
            help="Shape, such as 12/2/64, or 64/4/192/128 if values have another width; or reports,"
            " paper, tiny.",
            autocompletion=completion("reports", "paper", "tiny"),
        ),
    ] = "reports",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the inputs. Default: bf16 on cuda, fp32 on cpu.", **DTYPE_CHOICES
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Sequence length in tokens, such as 64k. Default: 8k on cuda, 1k on cpu.",
            metavar="TOKENS",
            parser=tokens(),
        ),
    ] = None,
    blocks: Blocks = "32,16,64,16,512",
    device: Device = "auto",
    threads: Threads = 1,
    budget: Annotated[
        float, typer.Option(help="Seconds to spend on each figure (3 to 20 samples).", min=0.001)
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of all random inputs.")] = 0,
    show: Annotated[
        bool, typer.Option("--show", help="Print the saved choices, and measure nothing.")
    ] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Delete the saved choices, and measure nothing.")
    ] = False,
) -> None:
    """Time the backends that can run each slot of a shape class, and save their order.

    `auto` then picks the fastest backend on this device (see `nsa backends explain`). A backend
    that fails its check against the float64 oracle is not timed: its slot keeps the order of
    the stated priorities, and the exit code is 1. A third-party backend runs in child processes:
    a crash, an exit or a hang is its failure, and the others are timed.
    """
    if show and reset:
        raise typer.BadParameter("--show prints what --reset deletes: pass one of them")
    if show or reset:
        others = sorted(options_on_command_line(context) - {"show", "reset"})
        refuse_options(
            others, f"not with --{'show' if show else 'reset'}, which is for all choices"
        )
    if show:
        _print_saved(tuned.read())
        return
    if reset:
        with contextlib.suppress(InvalidInput):  # it deletes a corrupt file, too
            _print_saved(tuned.read())
        _reset()
        return
    from nsa_bench.shapes import parse_shape

    sizes, parsed = block_sizes(blocks), parse_shape(shape)
    with output.naming("--blocks:"):
        config = parsed.config(sizes)
    name = None if dtype is None else one_dtype(dtype)
    torch_device = pick_device(device, threads)
    cuda = torch_device.startswith("cuda")
    import torch

    from nsa_bench.tune import tune as run_tuning
    from nsa_bench.tune_candidates import find_tune_candidates

    tuned.check_writable()
    output.import_with_plugins("nsa_bench.tune")
    registry = output.find_backends()
    torch_dtype = getattr(torch, name or ("bfloat16" if cuda else "float32"))
    candidates = find_tune_candidates(config, registry, device=torch_device, dtype=torch_dtype)
    with output.progress(candidates.steps) as advance:
        result = run_tuning(
            candidates,
            length=length or (8192 if cuda else 1024),
            seed=seed,
            budget_s=budget,
            advance=advance,
        )
    files = ResultFiles()
    files.write(tuned.path(), lambda _: tuned.save(result.records))
    _print_tuning(result, files.written)
    code = files.exit_code(output.FAILED if result.failed else 0)
    raise typer.Exit(code)


def _print_saved(records: list[Record]) -> None:
    """Print saved choices, one table for each device, version of torch and shape."""
    console = output.console()
    tables: dict[str, list[list[str]]] = {}
    for record in records:
        shape, use = record.shape_class.rsplit(" ", 1)
        title = f"{record.device}, torch {record.torch}, {shape}"
        if record.torch != tuned.torch_version():
            title += f" (not used: torch {tuned.torch_version()} is installed)"
        fastest = min(record.times_ms, key=record.times_ms.__getitem__)
        row = [record.slot, use, fastest, record.sentence()]
        tables.setdefault(output.one_line(title), []).append(row)
    for title, rows in tables.items():
        output.print_text(console, title, "bold")
        output.print_table(console, ["slot", "use", "backend", "measured"], sorted(rows))
    if not tables:
        output.print_text(console, f"no choices are saved in {tuned.path()}")


def _reset() -> None:
    """Delete the saved choices, so that `auto` follows the ranks of the backends."""
    if tuned.path().exists():
        with writing(tuned.path()):
            tuned.path().unlink(missing_ok=True)
        output.print_text(output.console(), f"deleted {tuned.path()}", "bold")


def _print_tuning(result: Tuning, files: list[Path]) -> None:
    from nsa_bench.render.format import number

    fastest = {
        (record.slot, record.shape_class.rsplit(" ", 1)[1]): min(
            record.times_ms, key=record.times_ms.__getitem__
        )
        for record in result.records
    }
    console = output.console()
    rows, reasons = [], []
    for time in sorted(result.times, key=lambda t: (t.slot, t.use, t.time_ms or float("inf"))):
        backend = f"{time.backend} {time.version}"
        chosen = "yes" if fastest.get((time.slot, time.use)) == time.backend else ""
        rows.append([time.slot, time.use, backend, number(time.time_ms), chosen])
        if time.reason:
            reasons.append(output.one_line(f"{time.slot}, {time.use}, {backend}: {time.reason}"))
    output.print_table(console, ["slot", "use", "backend", "ms", "chosen"], rows)
    for reason in reasons:
        output.print_text(console, f"not timed: {reason}", "yellow")
    wrong = [f"NOT CORRECT {g.combo}: {line}" for g in result.gates for line in g.failures[:3]]
    for line in dict.fromkeys(wrong):  # most faults of inference are faults of training, too
        output.print_text(console, output.one_line(line), "red")
    for path in files:
        saved = f"{len(result.records)} choices for {result.device} saved in {path}"
        output.print_text(console, saved, "bold")
