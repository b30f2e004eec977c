"""`nsa bench --context-parallel`: settings, the run on every rank, and the tables of rank 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_cli import bench_options, output
from nsa_cli.choices import as_options, dtype_names, leave_out, pick_device, split_commas
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.limits import COUNT, as_integer
from nsa_core.util.interruption import Interruption

if TYPE_CHECKING:
    from nsa_bench.parallel.result import ParallelResult
    from nsa_bench.parallel.settings import ParallelSettings

# options of `nsa bench` that have no effect with --context-parallel
UNUSED = (
    *("rival", "phase", "batch", "page_size", "inputs", "text", "checkpoint"),
    *("max_call", "html"),
)
PRESETS: dict[str, dict[str, dict[str, str]]] = {
    "quick": {
        "cpu": {"shapes": "tiny", "lengths": "256,512", "dtypes": "float32"},
        "cuda": {"shapes": "64/4/128", "lengths": "64k,128k", "dtypes": "bfloat16"},
    },
    "full": {
        "cpu": {"shapes": "tiny", "lengths": "256..2k", "dtypes": "float32"},
        "cuda": {"shapes": "64/4/128", "lengths": "64k..1024k", "dtypes": "bfloat16"},
    },
}
BUDGET_S = {"quick": 0.5, "full": 1.0}
TIME_LIMIT_S = {"quick": 240.0, "full": 540.0}
_CONTROL_S = 1800.0  # longest time that a rank waits for another one


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a run that only --context-parallel has.

    Attributes:
        modes: Comma-separated modes.
        layouts: Comma-separated layouts.
        project: Comma-separated numbers of GPUs.
        longest: Whether to search the longest sequences; None: on a GPU.
    """

    modes: str
    layouts: str
    project: str
    longest: bool | None


def settings(
    ranks: int,
    parts: Parts,
    preset: str,
    overrides: Mapping[str, str | None],
    combos: Sequence[str],
    numbers: Mapping[str, Any],
    device: str,
) -> ParallelSettings:
    """Return the settings of a run.

    Args:
        ranks: Number of ranks.
        parts: The parts of the run.
        preset: quick or full.
        overrides: shapes, lengths and dtypes; None takes the preset's.
        combos: At most one combination of backends.
        numbers: blocks, threads, seed and limits; a limit of None takes the preset's.
        device: auto, cpu or cuda.

    Raises:
        InvalidInput: An option is invalid.
        BackendUnavailable: This machine has fewer GPUs than ranks.
    """
    from nsa_bench.parallel.settings import ParallelSettings
    from nsa_bench.shapes import parse_lengths, parse_shape
    from nsa_verify.combination import parse_combination

    torch_device = pick_device(device, numbers["threads"]).partition(":")[0]
    _check_gpus(torch_device, ranks)
    values = dict(PRESETS[preset][torch_device])
    values |= {name: text for name, text in overrides.items() if text is not None}
    if len(combos) > 1:
        raise InvalidInput(f"--context-parallel times one --combo, got {len(combos)}")
    backends = dict(parse_combination(combos[0]).backends) if combos else None
    limits = {
        "budget_s": BUDGET_S[preset] if numbers["budget_s"] is None else numbers["budget_s"],
        "time_limit_s": TIME_LIMIT_S[preset]
        if numbers["time_limit_s"] is None
        else numbers["time_limit_s"],
    }
    return ParallelSettings(
        ranks=ranks,
        shapes=[parse_shape(word) for word in split_commas(values["shapes"])],
        lengths=parse_lengths(values["lengths"]),
        dtypes=dtype_names(values["dtypes"]),
        modes=split_commas(parts.modes),
        layouts=split_commas(parts.layouts),
        projected=[_count(word) for word in split_commas(parts.project)],
        largest=torch_device == "cuda" if parts.longest is None else parts.longest,
        backends=backends or None,
        device=torch_device,
        **(dict(numbers) | limits),
    )


def _count(word: str) -> int:
    number = as_integer(word)
    if number is None or number > COUNT:
        raise InvalidInput(f"--project must be numbers of GPUs such as 4,8, got {word!r:.80}")
    return number


def _check_gpus(device: str, ranks: int) -> None:
    import torch

    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise BackendUnavailable(
            f"--context-parallel {ranks} needs {ranks} GPUs on this machine, which has"
            f" {torch.cuda.device_count()}; give --device cpu to run it over gloo"
        )


def check_ranks(ranks: int) -> None:
    """Check that torchrun started this process, with one process for each rank.

    Raises:
        InvalidInput: It did not; the message has the command.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_torchelastic_launched()):
        raise InvalidInput(
            f"--context-parallel {ranks} runs on {ranks} processes: start them with torchrun"
            f" --standalone --nproc-per-node {ranks} -m nsa_cli bench --context-parallel {ranks}"
        )


def run(
    chosen: ParallelSettings, json_file: Path | None, force: bool, stop: Interruption
) -> tuple[ParallelResult, bool]:
    """Run the benchmark on this rank.

    Rank 0 writes the result file after each step, so that a later failure loses nothing.

    Returns:
        The result, equal on all ranks, and whether this is rank 0.

    Raises:
        InvalidInput: torchrun started another number of processes.
    """
    import torch.distributed as dist

    from nsa_bench.parallel.run import ParallelBench
    from nsa_bench.parallel.workers import control_group

    control_group(max(_CONTROL_S, 2 * chosen.time_limit_s))
    try:
        world, first = dist.get_world_size(), dist.get_rank() == 0
        if world != chosen.ranks:
            raise InvalidInput(
                f"--context-parallel {chosen.ranks} runs on {chosen.ranks} processes, but torchrun"
                f" started {world}: give --nproc-per-node {chosen.ranks}"
            )
        written = False

        def keep(result: ParallelResult) -> None:
            nonlocal written
            if first and json_file is not None:
                output.write_atomic(json_file, result.to_json(), force or written)
                written = True

        bench = ParallelBench(chosen, output.environment(), keep)
        if not first:
            return bench.run(stop=stop), False
        with output.progress(bench.steps()) as advance:
            return bench.run(advance, stop), True
    finally:
        dist.destroy_process_group()


def print_result(result: ParallelResult) -> None:
    """Print the tables and sentences of a result."""
    from nsa_bench.render.tables_parallel import LEGEND, parallel_summary, parallel_tables

    console = output.console()
    for title, columns, cells in parallel_tables(result):
        output.print_table(console, columns, cells, title)
        console.print()
    output.print_text(console, LEGEND)
    for style, line in parallel_summary(result):
        output.print_text(console, line, style)


def check_typed(typed: set[str]) -> None:
    """Refuse typed options that have no effect with --context-parallel.

    Raises:
        InvalidInput: There is one.
    """
    if unused := [name for name in UNUSED if name in typed]:
        raise InvalidInput(f"{as_options(unused)}: not for --context-parallel; {leave_out(unused)}")


def check_alone(typed: set[str]) -> None:
    """Refuse options of --context-parallel that are typed without it.

    Raises:
        InvalidInput: There is one.
    """
    if unused := [name for name in bench_options.PARALLEL_ONLY if name in typed]:
        raise InvalidInput(
            f"{as_options(unused)}: only with --context-parallel; {leave_out(unused)}"
        )
