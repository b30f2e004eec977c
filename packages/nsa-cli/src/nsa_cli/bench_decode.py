"""`nsa bench --phase decode`: what is measured, and the table of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsa_bench.render.report import Rows, milliseconds, number, size
from nsa_cli import bench_options, output
from nsa_cli.choices import dtype_names, pick_device
from nsa_core.contract import SLOTS
from nsa_core.util.interruption import Interruption

if TYPE_CHECKING:
    from nsa_bench.decode_workloads import Cell
    from nsa_bench.result import Measurement, Result


def cells(shape: str | None, length: str | None, batch: int, page_size: int | None) -> list[Cell]:
    """Every shape at every length; none where neither is named, for the device's own."""
    from nsa_bench.decode import shape_named
    from nsa_bench.decode_workloads import Cell
    from nsa_bench.shapes import parse_lengths

    if shape is None and length is None:
        return []
    shapes = [shape_named(word) for word in (shape or "reports").split(",")]
    return [Cell(one, batch, n, page_size) for one in shapes for n in parse_lengths(length or "512,1024,2048")]


def run(
    chosen: Sequence[Cell],
    combos: Sequence[str],
    dtype: str | None,
    blocks: tuple[int, ...],
    device: str,
    threads: int,
    seed: int,
    limits: Mapping[str, float | None],
    preset: str,
    cell_limit_s: float,
    stop: Interruption,
) -> Result:
    """Measure; limits left out are the preset's."""
    from nsa_bench.combos import parse_combo
    from nsa_bench.decode import DecodeBench, DecodeSettings

    place = pick_device(device, threads)
    dtypes = dtype_names(dtype or ("bfloat16" if place.startswith("cuda") else "float32"))
    defaults = {"budget_s": bench_options.BUDGET_S, "time_limit_s": bench_options.TIME_LIMIT_S}
    numbers: dict[str, Any] = {
        name: given if given is not None else defaults[name][preset] for name, given in limits.items()
    }
    settings = DecodeSettings(
        cells=chosen, dtypes=dtypes, combos=[parse_combo(word) for word in combos], blocks=blocks, device=place,
        seed=seed, cell_limit_s=cell_limit_s, **numbers,
    )  # fmt: skip
    bench = DecodeBench(settings, output.find_backends(), output.environment())
    with output.progress(len(bench.problems())) as advance:
        return bench.run(advance, stop)


def decode_rows(result: Result) -> Iterator[Rows]:
    """A table per shape, dtype and kind of cache: a row per cell and subject."""
    found = [m for m in result.measurements if m.phase == "decode"]
    for group in dict.fromkeys((m.shape, m.dtype, m.inputs) for m in found):
        title = f"{group[0]} {group[1]}, a step (cache: {group[2]}): ms (median), and a slot's share of the step"
        columns = ["B x tokens", "subject", "ms", "q1..q3", "CV", *SLOTS, "sum", "x dense", "TB/s", "of floor", "MiB"]
        rows = [m for m in found if (m.shape, m.dtype, m.inputs) == group]
        yield title, columns, [_row(m) for m in rows]


def _row(m: Measurement) -> list[str]:
    from nsa_bench.timing import spread_of_repeats

    where, p = f"{m.batch} x {m.length}", m.performance
    if p is None:
        return [where, m.subject, "-", *[""] * (len(SLOTS) + 7)]  # the summary says why
    spread = spread_of_repeats(p)
    shares = shares_of(m)
    parts = [f"{milliseconds(m.parts[s].performance)} ({shares[s]:.0%})" if s in shares else "" for s in SLOTS]
    rate = "-" if m.kind == "layer" else number(m.bytes / p.median_ms / 1e9)
    return [
        where, m.subject, number(p.median_ms), f"{number(p.q1_ms)}..{number(p.q3_ms)}",
        "-" if spread is None else f"{spread:.1%}", *parts, f"{sum(shares.values()):.0%}" if shares else "",
        number(m.ratio_to_dense), rate, "-" if m.floor_fraction is None else f"{m.floor_fraction:.1%}",
        size(m.peak_memory_bytes),
    ]  # fmt: skip


def shares_of(m: Measurement) -> dict[str, float]:
    """Each slot's time over that of the step by its slots."""
    if m.performance is None:
        return {}
    whole = m.performance.median_ms
    return {name: part.performance.median_ms / whole for name, part in m.parts.items() if part.performance}


def decode_notes(result: Result) -> Iterator[str]:
    """How to read the table."""
    if any(m.subject.endswith(", slots one by one") for m in result.measurements):
        yield "shares are of the slots run one by one; the step itself is fused, and its parts are not timed apart"
    steps = [m for m in result.measurements if m.phase == "decode"]
    methods = {part.performance.method for m in steps for part in m.parts.values() if part.performance}
    within = {method for method in methods if method.startswith("within")}
    if within:
        yield "slots: as they follow one another in a step; on a GPU graphs of the first slots, each less the last one"
    if methods - within:  # result files of before slots were timed so
        yield "slots: each alone, with a beginning and an end of its own: their sum may be more than the step"
    yield "CV: deviation of 5 repeats over their mean; TB/s: bytes that a step must move over its time"
    yield "layer step: attn(x, cache=cache), projections and appends included, on a default layer of these heads"
