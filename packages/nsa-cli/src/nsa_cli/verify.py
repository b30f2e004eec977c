"""`nsa verify`: check combinations of backends against the float64 oracle."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from nsa_cli import output
from nsa_cli.choices import (
    DTYPE_CHOICES,
    BackendOfSlot,
    Json,
    advanced,
    check_backends,
    dtype_names,
    pick_device,
    refuse_options,
)
from nsa_cli.result_files import ResultFiles
from nsa_cli.verify_run import SCHEMA_VERSION, RunOptions, run_combinations
from nsa_core.errors import InvalidInput
from nsa_core.limits import as_integer
from nsa_core.util.child import preload
from nsa_core.util.interruption import recorded_signals
from nsa_verify.run import PRELOADED

# The first two also run the larger hand-written cases.
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def verify(
    cmp: BackendOfSlot = None,
    sel: BackendOfSlot = None,
    win: BackendOfSlot = None,
    select: BackendOfSlot = None,
    combine: BackendOfSlot = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="auto: cuda if a GPU is available, else cpu."),
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated dtypes. Default: all that the backends accept on the device.",
            **DTYPE_CHOICES,
        ),
    ] = None,
    preset: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: about a minute on two quiet cores.")
    ] = "quick",
    phase: Annotated[
        Literal["prefill", "decode", "both"],
        advanced(help="Slot forms to check; decode: steps over a cache."),
    ] = "both",
    json_file: Json = None,
    force: Annotated[bool, advanced("--force", help="Overwrite the --json file.")] = False,
    seed: Annotated[
        int, advanced(min=0, help="Seed of all random inputs and of the generated cases.")
    ] = 0,
    cases: Annotated[
        int | None,
        advanced(
            min=0,
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
            help=(
                "Run one case of a slot, decode step or cache history alone, such as"
                " 'win w=3 tokens=5', 'decode lengths=9,5 new=1,1' or 'cache batch=2 step=5,3'."
                " A failed one prints its line."
            ),
        ),
    ] = None,
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
    shard: Annotated[
        str | None,
        advanced(
            metavar="I/N",
            help=(
                "Run the I-th of N equal parts of the checks, such as 1/4. The parts together are"
                " the whole run."
            ),
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        advanced(
            min=1,
            help=(
                "Number of processes that run checks in parallel; the report does not depend on it."
                " Default: one per core, at most 16; on the CPU 1 for few checks."
            ),
        ),
    ] = None,
    job_timeout: Annotated[
        float | None,
        advanced(
            min=1,
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
    """
    by_slot = {"cmp": cmp, "sel": sel, "win": win, "select": select, "combine": combine}
    named = {slot: name for slot, name in by_slot.items() if name is not None}
    with recorded_signals() as stop:
        output.check_writable("--json", json_file, force)
        for slot, backend in named.items():
            check_backends([backend], f"--{slot}")
        from nsa_verify.drawn.parser import parse

        try:
            only = parse(case) if case is not None else None
        except InvalidInput as error:  # its message begins with "case"
            raise InvalidInput(f"--{error}") from error
        if only:
            others = {"dtype": dtype, "cases": cases, "shard": shard}
            given = [name for name, value in others.items() if value is not None]
            refuse_options(given, "not with --case")
        part = _shard(shard)
        names = [only.dtype] if only else dtype_names(",".join(_DTYPES) if dtype is None else dtype)
        is_whole = all(x is None for x in (only, shard, cases, dtype))
        if jobs != 1 and is_whole:  # so there are many checks
            preload(*PRELOADED)
        output.import_with_plugins("nsa_verify.run.workers")
        registry = output.find_backends()
        torch_device = pick_device(device)
        import torch

        from nsa_verify.problems.combination import every_combination

        dtypes = [getattr(torch, name) for name in names]
        combinations = (
            every_combination(registry, torch_device, dtypes, named, phase == "decode")
            if every
            else [named]
        )
        options = RunOptions(
            device=torch_device,
            dtypes=dtypes,
            only_accepted=dtype is None and only is None,
            preset=preset,
            seed=seed,
            phase=phase,
            jobs=jobs,
            job_timeout=job_timeout,
            cases=cases,
            only=only,
            shard=part,
        )
        reports = run_combinations(combinations, options, registry, stop)
        report: dict[str, Any] = reports[0]
        if every:
            report = {"schema_version": SCHEMA_VERSION, "combinations": reports}
        files, text_of_report = ResultFiles(), json.dumps(report, indent=1) + "\n"
        files.write_json(json_file, text_of_report, force)
        from nsa_cli.verify_report import print_reports, verdict

        if json_file != output.STDOUT:
            typed = {"--cases": cases, "--job-timeout": job_timeout}
            print_reports(reports, every, verbose, typed)
        _, code = verdict(reports, every)
        files.exit_code(code)
    raise typer.Exit(code)


def _shard(text: str | None) -> tuple[int, int] | None:
    """Return (I, N) of --shard I/N."""
    if text is None:
        return None
    index, _, count = text.partition("/")
    part, parts = as_integer(index), as_integer(count)
    if part is None or parts is None or not 1 <= part <= parts:
        raise typer.BadParameter(
            f"{text!r} is not I/N with 1 <= I <= N, such as 1/4, the first of four parts",
            param_hint="--shard",
        )
    return part, parts
