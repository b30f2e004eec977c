"""`nsa verify`: run a combination of backends against the oracle, and say how far each is from its
budget.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import output
from nsa_cli.choices import dtype_names, pick_device
from nsa_core.util.interruption import Interruption, held

if TYPE_CHECKING:
    import torch

    from nsa_core.dispatch.plan import Plan
    from nsa_verify.combination import Combination

SCHEMA_VERSION = 1


class Preset(str, enum.Enum):
    """How much to run."""

    quick = "quick"
    full = "full"


class Device(str, enum.Enum):
    """Where to run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Phase(str, enum.Enum):
    """Which forms of the slots to check."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


_Backend = typer.Option(
    help="Backend of this slot; left out, the best that is ready.", show_default=False
)
_Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        show_default=False,
        help=(
            "Processes that judge, and compile kernels, at once, to the same report; by default one"
            " a core on cuda and in triton's interpreter, 8 at most, and one on the CPU otherwise."
        ),
    ),
]


def verify(
    cmp: Annotated[str | None, _Backend] = None,
    sel: Annotated[str | None, _Backend] = None,
    win: Annotated[str | None, _Backend] = None,
    select: Annotated[str | None, _Backend] = None,
    combine: Annotated[str | None, _Backend] = None,
    device: Annotated[Device, typer.Option(help="auto: cuda where there is one.")] = Device.auto,
    dtype: Annotated[
        str, typer.Option(help="Comma-separated: bfloat16, float16, float32, float64.")
    ] = "float32,bfloat16",
    preset: Annotated[
        Preset, typer.Option(help="quick: under a minute on two cores.")
    ] = Preset.quick,
    phase: Annotated[Phase, typer.Option(help="decode: steps over a cache.")] = Phase.both,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text whose bytes make the real case; by default a README.", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write every finding to this file.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the --json file.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random input.")] = 0,
    reads: Annotated[
        bool,
        typer.Option(
            "--reads", help="Count the cached tokens that a step of decode reads, by experiment."
        ),
    ] = False,
    every: Annotated[
        bool,
        typer.Option(
            "--every-combination",
            help="All ready backends over cmp, sel and win; a slot named stays.",
        ),
    ] = False,
    jobs: _Jobs = None,
) -> None:
    """Check a combination of backends, branch by branch, against an independent float64 truth.

    Where triton interprets its kernels (TRITON_INTERPRET=1) on the CPU, the cases are tiny and the
    interpreter strict.

    Exit code 0: every check passed; 1: one failed; 2: bad usage; 3: a named backend cannot run
    here; 4: nothing can.
    """
    chosen = {"cmp": cmp, "sel": sel, "win": win, "select": select, "combine": combine}
    named = {slot: name for slot, name in chosen.items() if name is not None}
    with output.exit_codes(), held() as stop:
        output.check_writable(json_file, force)
        names, place = dtype_names(dtype), pick_device(device.value)
        dtypes, words = _dtypes(names), read_text(text)
        combinations = _every(named, place, dtypes, phase.value) if every else [named]
        reports = _run(
            combinations, place, dtypes, preset.value, words, seed, phase.value, reads, jobs, stop
        )
        report: dict[str, Any] = reports[0]
        if every:
            report = {"schema_version": SCHEMA_VERSION, "combinations": reports}
        if json_file is not None:
            output.write_atomic(json_file, json.dumps(report, indent=1) + "\n", force)
        code = _print_combinations(report["combinations"]) if every else _print_report(report)
    raise typer.Exit(code)


def _jobs(device: str, interpreted: bool) -> int:
    """A process for each core this one may use, on a GPU and in triton's interpreter, which is
    plain Python.

    Eight at most: each holds half a gigabyte of a GPU's memory.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, 8) if device == "cuda" or interpreted else 1


def _every(
    named: dict[str, str], device: str, dtypes: Sequence[torch.dtype], phase: str
) -> list[dict[str, str]]:
    from nsa_verify.combination import every_combination

    return every_combination(
        output.find_backends(), device, dtypes, named, decode=phase == "decode"
    )


def _plan(combination: Combination, dtypes: Sequence[torch.dtype], preset: str, phase: str) -> Plan:
    """The plan in the first dtype that the combination takes; refuses unknown and unavailable names
    before any work.

    With ``phase`` decode alone, that is the plan of a step.

    Raises:
        Unsupported: the combination takes none of them; the reasons are those against the first.
    """
    from nsa_core.errors import Unsupported
    from nsa_verify import cases

    config, refusals = cases.PRESETS[preset]()[0].config, []
    for dtype in dtypes:
        try:
            if phase == "decode":
                return combination.plan(config, dtype, needs_grad=False, phase=phase)
            return combination.plan(config, dtype)
        except Unsupported as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _dtypes(names: Sequence[str]) -> list[torch.dtype]:
    import torch

    return [getattr(torch, name) for name in names]


def read_text(path: Path | None) -> tuple[str, bytes]:
    """(name, bytes) of the real case: the given file, the nearest README.md, or the one this
    package carries.
    """
    from nsa_core.errors import InvalidInput

    if path is None:
        for folder in (Path.cwd(), *Path.cwd().parents):
            if (folder / "README.md").is_file() and (folder / "README.md").stat().st_size:
                path = folder / "README.md"
                break
        else:
            from importlib.metadata import metadata

            return "description of nsa-core", str(metadata("nsa-core").json["description"]).encode()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"--text {path}: {error.strerror or error}") from error
    if not content:
        raise InvalidInput(f"--text {path} has 0 bytes; give a file with text")
    return path.name, content


def _run(
    combinations: Sequence[dict[str, str]],
    device: str,
    dtypes: Sequence[torch.dtype],
    preset: str,
    text: tuple[str, bytes],
    seed: int,
    phase: str,
    reads: bool,
    jobs: int | None,
    stop: Interruption,
) -> list[dict[str, Any]]:
    """A report per combination; once ``stop`` has come, of the checks that had ended by then."""
    import torch

    from nsa_core.dtypes import dtype_name
    from nsa_verify.combination import Combination
    from nsa_verify.run import suite
    from nsa_verify.run.contexts import emulated
    from nsa_verify.run.runner import run_jobs

    # The cases are small: handing them to more threads takes longer than computing them.
    torch.set_num_threads(1 if device == "cpu" else min(4, torch.get_num_threads()))
    combos = [Combination(named, device, output.find_backends()) for named in combinations]
    interpreted = any(map(emulated, combos))
    preset, text = ("interpreter", ("none", b"")) if interpreted else (preset, text)
    plans = [_plan(combination, dtypes, preset, phase) for combination in combos]
    todo = suite.jobs(preset, dtypes, text=text[1] or None, seed=seed, phase=phase)
    jobs = jobs or _jobs(device, interpreted)
    with output.progress(len(todo) * len(combos)) as advance:
        done = run_jobs(combos, todo, processes=jobs, stop=stop, advance=advance)
    counted: list[dict[str, Any]] = [{} for _ in combos]
    with stop.cuts_short():
        for index, combination in enumerate(combos if reads else ()):
            counted[index] = {} if stop.came else _count(combination, dtypes)
    checks = len(todo) + reads
    left = [checks - len(found) - bool(read) for found, read in zip(done.findings, counted)]
    common = {
        "schema_version": SCHEMA_VERSION,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "interpreted": interpreted,
        "dtypes": [dtype_name(d) for d in dtypes],
        "preset": preset,
        "phase": phase,
        "seed": seed,
        "text": {"name": text[0], "bytes": len(text[1])},
        "environment": output.environment(),
        "peak_memory_bytes": (
            max(done.peak_bytes, torch.cuda.max_memory_allocated()) if device == "cuda" else None
        ),
    }
    return [
        {
            **common,
            **read,
            "backends": {slot: f"{c.backend} {c.version}" for slot, c in plan.choices.items()},
            "named": named,
            "seconds": round(taken, 2),
            "interrupted": {"signal": stop.name, "checks_left": n, "checks": checks} if n else None,
            "findings": [dataclasses.asdict(f) for job in found for f in job],
        }
        for named, plan, taken, found, read, n in zip(
            combinations, plans, done.seconds, done.findings, counted, left
        )
    ]


def _count(combination: Combination, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """What a step reads at every length of verify.reads, in the first dtype that has decode
    forms.
    """
    from nsa_core.errors import Unsupported
    from nsa_verify.checks.reads import LENGTHS, PAPER_BOUND, count_reads, reads_config

    config, refusals = reads_config(), []
    for dtype in dtypes:
        try:
            found = [
                entry
                for length in LENGTHS
                for entry in count_reads(combination, config, length, dtype)
            ]
        except Unsupported as refusal:
            refusals.append(str(refusal))
            continue
        bounds = {str(length): PAPER_BOUND[length] for length in LENGTHS if length in PAPER_BOUND}
        return {"reads": [dataclasses.asdict(entry) for entry in found], "reads_bounds": bounds}
    return {"reads": [], "reads_refused": refusals[0]}


def _print_report(report: dict[str, Any]) -> int:
    from nsa_cli.verify_report import failures, reads_table, summary, table

    console = output.console()
    console.print(table(report["findings"], bool(report.get("interrupted"))))
    if "reads" in report:
        console.print(reads_table(report))
    for line in failures(report):
        console.print(line, style="red", markup=False)
    line, code = summary(report)
    console.print(line, markup=False, style="bold green" if code == 0 else "bold red")
    return code


def _print_combinations(reports: list[dict[str, Any]]) -> int:
    from nsa_cli.verify_report import combinations, cut_short, failures, summary

    console = output.console()
    console.print(combinations(reports))
    for line in [line for report in reports for line in failures(report)][:20]:
        console.print(line, style="red", markup=False)
    codes = [summary(report)[1] for report in reports]
    passed, code = codes.count(0), 1 if 1 in codes else max(codes)
    line = (
        f"{passed} of {len(reports)} combinations passed in"
        f" {sum(r['seconds'] for r in reports):.0f} s"
    )
    if cut := cut_short(reports):
        code, line = cut[1], f"{cut[0]}; {line}"
    console.print(line, markup=False, style="bold green" if code == 0 else "bold red")
    return code
