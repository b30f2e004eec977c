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
from nsa_cli.result_files import ResultFiles
from nsa_cli.verify_isolated import (
    call_planning,
    default_job_limit_s,
    is_isolated,
    plan_all,
    prepare_children,
    reads_or_failure,
)
from nsa_core.util.interruption import Interruption, deferred_signals

if TYPE_CHECKING:
    import torch

    from nsa_verify.combination import Combination
    from nsa_verify.findings import Finding
    from nsa_verify.generated.case import GeneratedCase
    from nsa_verify.histories.history import History
    from nsa_verify.run.suite import Job

SCHEMA_VERSION = 1
# The first two also run the larger hand-written cases of quick.
_DTYPES = ("float32", "bfloat16", "float16", "float64")


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
        str | None,
        typer.Option(
            help=(
                "Comma-separated dtypes: bf16, fp16, fp32, fp64, or long names such as bfloat16."
                " Default: all that the backends accept on the device."
            ),
            show_default=False,
        ),
    ] = None,
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
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of all random inputs and of the generated cases.")
    ] = 0,
    cases: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help=(
                "Generated cases of each slot. Default: as many as cover every pair of parameter"
                " values; with --preset full also triples."
            ),
        ),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(
            metavar="LINE",
            show_default=False,
            help="Run one generated case alone, such as slot=win,w=3,tokens=5.",
        ),
    ] = None,
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
    job_timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            show_default=False,
            help=(
                "Seconds after which a check of a third-party backend counts as hanging. Default:"
                " 60 on the CPU, 300 on cuda and in an interpreter."
            ),
        ),
    ] = None,
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
    on this machine; 4: no backend can run; 5: the report could not be written.
    """
    by_slot = {"cmp": cmp, "sel": sel, "win": win, "select": select, "combine": combine}
    named = {slot: name for slot, name in by_slot.items() if name is not None}
    with output.exit_codes(), deferred_signals() as stop:
        output.check_writable(json_file, force)
        prepare_children(named)
        from nsa_verify.generated.case import parse_case

        generated = parse_case(case) if case is not None else None
        names = [generated.dtype] if generated else dtype_names(dtype or ",".join(_DTYPES))
        torch_device, content = pick_device(device.value), read_text(text)
        dtypes = _dtypes(names)
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
            job_timeout,
            only_accepted=dtype is None and generated is None,
            cases=cases,
            only=generated or _history(history),
        )
        report: dict[str, Any] = reports[0]
        if every:
            report = {"schema_version": SCHEMA_VERSION, "combinations": reports}
        files, text_of_report = ResultFiles(), json.dumps(report, indent=1) + "\n"
        files.write(json_file, lambda f: output.write_atomic(f, text_of_report, force), keep=True)
        from nsa_cli.verify_report import print_combinations, print_report

        code = print_combinations(reports) if every else print_report(report, verbose)
        files.exit_code(code)
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

    registry = output.find_backends()
    arguments = (registry, device, dtypes, named, phase == "decode")
    combinations: list[dict[str, str]] = call_planning(
        is_isolated([named], registry), every_combination, *arguments
    )
    return combinations


def _accepted(
    combos: Sequence[Combination], dtypes: Sequence[torch.dtype], phase: str
) -> list[torch.dtype]:
    """Return those of ``dtypes`` that at least one combination accepts."""
    from nsa_verify.combination import accepted_dtypes

    accepted = {d for c in combos for d in accepted_dtypes(c, dtypes, phase == "decode")}
    return [dtype for dtype in dtypes if dtype in accepted]


def _history(line: str | None) -> History | None:
    if line is None:
        return None
    from nsa_verify.histories.history import parse_history

    return parse_history(line)


def _only_jobs(only: GeneratedCase | History, dtypes: Sequence[torch.dtype]) -> list[Job]:
    """List the jobs of one generated case, or of one history in each dtype."""
    from nsa_verify.generated import jobs as generated
    from nsa_verify.generated.case import GeneratedCase
    from nsa_verify.generated.shrink import ShrinkBudget
    from nsa_verify.run import suite

    if isinstance(only, GeneratedCase):
        return [generated.job_of(only, suite.Job, ShrinkBudget(0))]
    return suite.history_jobs(only, dtypes)


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
    job_timeout: float | None,
    *,
    only_accepted: bool,
    cases: int | None,
    only: GeneratedCase | History | None,
) -> list[dict[str, Any]]:
    """Run the checks and return a report per combination.

    After a signal (``stop``), the reports hold the checks that had ended by then. With
    ``only_accepted``, dtypes that every combination refuses are left out. ``only`` runs alone.
    """
    import torch

    from nsa_core.dtypes import dtype_name
    from nsa_verify.combination import Combination
    from nsa_verify.generated import jobs as generated
    from nsa_verify.run import suite
    from nsa_verify.run.runner import run_jobs

    # Cases are small: starting more threads takes longer than the computation.
    torch.set_num_threads(1 if device == "cpu" else min(4, torch.get_num_threads()))
    registry = output.find_backends()
    combos = [Combination(named, device, registry) for named in combinations]
    isolated = is_isolated(combinations, registry)
    interpreted, chosen = call_planning(isolated, plan_all, combos, dtypes, preset, phase)
    preset, text = ("interpreter", ("none", b"")) if interpreted else (preset, text)
    if only_accepted:
        candidates = dtypes[:2] if interpreted else dtypes
        dtypes = call_planning(isolated, _accepted, combos, candidates, phase) or dtypes
    job_limit_s = job_timeout or default_job_limit_s(device, interpreted) if isolated else None
    suite_jobs = (
        _only_jobs(only, dtypes)
        if only is not None
        else suite.jobs(
            preset,
            dtypes,
            text=text[1] or None,
            seed=seed,
            phase=phase,
            cases_per_slot=cases,
        )
    )
    processes = jobs or _default_processes(device, interpreted)
    with output.progress(len(suite_jobs) * len(combos)) as advance:
        results = run_jobs(
            combos,
            suite_jobs,
            processes=processes,
            job_limit_s=job_limit_s,
            stop=stop,
            advance=advance,
        )
    read_counts: list[dict[str, Any]] = [{} for _ in combos]
    failed: list[list[Finding]] = [[] for _ in combos]
    with stop.stop_on_interrupt():
        for index, combination in enumerate(combos if reads else ()):
            if not stop.received:
                read_counts[index], failed[index] = reads_or_failure(
                    combination, dtypes, job_limit_s
                )
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
            "backends": backends,
            "named": named,
            "seconds": round(seconds, 2),
            "interrupted": (
                {"signal": stop.name, "checks_left": left, "checks": checks} if left else None
            ),
            "generated": {
                slot: dataclasses.asdict(count)
                for slot, count in generated.count_cases(
                    [finding for job in findings for finding in job]
                ).items()
            },
            "findings": [
                dataclasses.asdict(finding) for job in [*findings, fault] for finding in job
            ],
        }
        for named, backends, seconds, findings, counts, fault, left in zip(
            combinations,
            chosen,
            results.seconds,
            results.findings,
            read_counts,
            failed,
            checks_left,
        )
    ]
