"""`nsa verify`: check combinations of backends against the float64 oracle."""

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
from nsa_core.util.interruption import Interruption, deferred_signals

if TYPE_CHECKING:
    import torch

    from nsa_core.dispatch.plan import Plan
    from nsa_verify.combination import Combination
    from nsa_verify.histories.history import History

SCHEMA_VERSION = 1


class Preset(str, enum.Enum):
    """The set of cases to check."""

    quick = "quick"
    full = "full"


class Device(str, enum.Enum):
    """The device to run on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Phase(str, enum.Enum):
    """The forms of the slots to check."""

    prefill = "prefill"
    decode = "decode"
    both = "both"


_Backend = typer.Option(
    help="Backend for this slot. Default: highest rank.", metavar="NAME", show_default=False
)
_Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        show_default=False,
        help=(
            "Number of processes that run checks in parallel; the report does not depend on it."
            " Default: one per core, at most 8, on cuda and in Triton's interpreter; else 1."
        ),
    ),
]


def verify(
    cmp: Annotated[str | None, _Backend] = None,
    sel: Annotated[str | None, _Backend] = None,
    win: Annotated[str | None, _Backend] = None,
    select: Annotated[str | None, _Backend] = None,
    combine: Annotated[str | None, _Backend] = None,
    device: Annotated[
        Device, typer.Option(help="auto: cuda if a GPU is available, else cpu.")
    ] = Device.auto,
    dtype: Annotated[
        str,
        typer.Option(
            help="Comma-separated dtypes: bf16, fp16, fp32, fp64, or long names such as bfloat16."
        ),
    ] = "float32,bfloat16",
    preset: Annotated[
        Preset, typer.Option(help="quick: less than a minute on two cores.")
    ] = Preset.quick,
    phase: Annotated[
        Phase, typer.Option(help="Slot forms to check; decode: steps over a cache.")
    ] = Phase.both,
    text: Annotated[
        Path | None,
        typer.Option(
            help="File whose bytes are the input of the real case. Default: a README.",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all findings to this file.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the --json file.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random inputs.")] = 0,
    reads: Annotated[
        bool,
        typer.Option(
            "--reads",
            help=(
                "Also count the cached tokens that a decode step reads, by changing cached values."
            ),
        ),
    ] = False,
    every: Annotated[
        bool,
        typer.Option(
            "--every-combination",
            help=(
                "Check each combination of ready backends over cmp, sel and win. A slot with a"
                " named backend keeps it."
            ),
        ),
    ] = False,
    history: Annotated[
        str | None,
        typer.Option(
            metavar="LINE",
            show_default=False,
            help=(
                "Run one history of a cache alone, in each dtype, such as"
                " 'window_size=1 batch=2 step=5,3 step=1,1'. A failed history prints its line."
            ),
        ),
    ] = None,
    jobs: _Jobs = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print a row per check and slot, with each kind of error."
        ),
    ] = False,
) -> None:
    """Check a combination of backends, slot by slot, against an independent float64 oracle.

    With TRITON_INTERPRET=1 on the CPU, Triton kernels run on small cases in the strict interpreter.

    Exit code 0: all checks passed; 1: a check failed; 2: usage error; 3: a named backend cannot run
    on this machine; 4: no backend can run.
    """
    by_slot = {"cmp": cmp, "sel": sel, "win": win, "select": select, "combine": combine}
    named = {slot: name for slot, name in by_slot.items() if name is not None}
    with output.exit_codes(), deferred_signals() as stop:
        output.check_writable(json_file, force)
        names, torch_device = dtype_names(dtype), pick_device(device.value)
        dtypes, content = _dtypes(names), read_text(text)
        combinations = (
            _every_combination(named, torch_device, dtypes, phase.value) if every else [named]
        )
        reports = _run(
            combinations,
            torch_device,
            dtypes,
            preset.value,
            content,
            seed,
            phase.value,
            reads,
            jobs,
            stop,
            history=_history(history),
        )
        report: dict[str, Any] = reports[0]
        if every:
            report = {"schema_version": SCHEMA_VERSION, "combinations": reports}
        if json_file is not None:
            output.write_atomic(json_file, json.dumps(report, indent=1) + "\n", force)
        from nsa_cli.verify_report import print_combinations, print_report

        code = print_combinations(reports) if every else print_report(report, verbose)
    raise typer.Exit(code)


def _default_processes(device: str, interpreted: bool) -> int:
    """Return the number of processes without --jobs: one per available core, at most 8, else 1.

    Several processes help on a GPU and in Triton's interpreter, which is plain Python. Each one
    holds half a gigabyte of GPU memory.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, 8) if device == "cuda" or interpreted else 1


def _every_combination(
    named: dict[str, str], device: str, dtypes: Sequence[torch.dtype], phase: str
) -> list[dict[str, str]]:
    from nsa_verify.combination import every_combination

    return every_combination(
        output.find_backends(), device, dtypes, named, decode=phase == "decode"
    )


def _plan(combination: Combination, dtypes: Sequence[torch.dtype], preset: str, phase: str) -> Plan:
    """Return the combination's plan in the first dtype that it supports.

    Planning before the checks refuses unknown and unavailable backends early. With ``phase``
    "decode", the plan is that of a decode step.

    Raises:
        Unsupported: The combination supports none of ``dtypes``; the message has the reasons
            against the first.
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


def _history(line: str | None) -> History | None:
    if line is None:
        return None
    from nsa_verify.histories.history import parse_history

    return parse_history(line)


def _dtypes(names: Sequence[str]) -> list[torch.dtype]:
    import torch

    return [getattr(torch, name) for name in names]


def read_text(path: Path | None) -> tuple[str, bytes]:
    """Return (name, bytes) of the text for the real case.

    Args:
        path: A file; None takes the nearest README.md above the working directory, or else the
            description of the installed nsa-core.

    Raises:
        InvalidInput: The file cannot be read, or is empty.
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
    *,
    history: History | None,
) -> list[dict[str, Any]]:
    """Run the checks and return a report per combination; ``history`` runs alone.

    After a signal (``stop``), the reports hold the checks that had ended by then.
    """
    import torch

    from nsa_core.dtypes import dtype_name
    from nsa_verify.combination import Combination
    from nsa_verify.run import suite
    from nsa_verify.run.contexts import needs_judge_context
    from nsa_verify.run.runner import run_jobs

    # Cases are small: starting more threads takes longer than the computation.
    torch.set_num_threads(1 if device == "cpu" else min(4, torch.get_num_threads()))
    combos = [Combination(named, device, output.find_backends()) for named in combinations]
    interpreted = any(map(needs_judge_context, combos))
    preset, text = ("interpreter", ("none", b"")) if interpreted else (preset, text)
    plans = [_plan(combination, dtypes, preset, phase) for combination in combos]
    suite_jobs = suite.jobs(preset, dtypes, text=text[1] or None, seed=seed, phase=phase)
    if history is not None:
        suite_jobs = suite.history_jobs(history, dtypes)
    processes = jobs or _default_processes(device, interpreted)
    with output.progress(len(suite_jobs) * len(combos)) as advance:
        results = run_jobs(combos, suite_jobs, processes=processes, stop=stop, advance=advance)
    read_counts: list[dict[str, Any]] = [{} for _ in combos]
    with stop.stop_on_interrupt():
        for index, combination in enumerate(combos if reads else ()):
            read_counts[index] = {} if stop.received else _count_reads(combination, dtypes)
    checks = len(suite_jobs) + reads
    checks_left = [
        checks - len(findings) - bool(counts)
        for findings, counts in zip(results.findings, read_counts)
    ]
    common = {
        "schema_version": SCHEMA_VERSION,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "interpreted": interpreted,
        "dtypes": [dtype_name(dtype) for dtype in dtypes],
        "preset": preset,
        "phase": phase,
        "seed": seed,
        "text": {"name": text[0], "bytes": len(text[1])},
        "environment": output.environment(),
        "peak_memory_bytes": (
            max(results.peak_bytes, torch.cuda.max_memory_allocated()) if device == "cuda" else None
        ),
    }
    return [
        {
            **common,
            **counts,
            "backends": {
                slot: f"{choice.backend} {choice.version}" for slot, choice in plan.choices.items()
            },
            "named": named,
            "seconds": round(seconds, 2),
            "interrupted": (
                {"signal": stop.name, "checks_left": left, "checks": checks} if left else None
            ),
            "findings": [dataclasses.asdict(finding) for job in findings for finding in job],
        }
        for named, plan, seconds, findings, counts, left in zip(
            combinations, plans, results.seconds, results.findings, read_counts, checks_left
        )
    ]


def _count_reads(combination: Combination, dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """Count the cached tokens that a decode step reads, in the first dtype with decode forms.

    The counts cover every length of :data:`nsa_verify.checks.reads.LENGTHS`.
    """
    from nsa_core.errors import Unsupported
    from nsa_verify.checks.reads import LENGTHS, PAPER_BOUND, count_reads, reads_config

    config, refusals = reads_config(), []
    for dtype in dtypes:
        try:
            entries = [
                entry
                for length in LENGTHS
                for entry in count_reads(combination, config, length, dtype)
            ]
        except Unsupported as refusal:
            refusals.append(str(refusal))
            continue
        bounds = {str(length): PAPER_BOUND[length] for length in LENGTHS if length in PAPER_BOUND}
        return {"reads": [dataclasses.asdict(entry) for entry in entries], "reads_bounds": bounds}
    return {"reads": [], "reads_refused": refusals[0]}
