"""Tiny decode steps whose launches detect mutants: every form, with and without splits.

Tensors lie between NaNs, so that reads outside their rows show.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from unittest import mock

import torch

from launches import apart
from nsa_backend_triton.decode import append as decode_append
from nsa_backend_triton.decode import compress as decode_compress
from nsa_backend_triton.decode import forms, launch
from nsa_backend_triton.decode import gates as decode_gates
from nsa_backend_triton.host import configs
from nsa_core.contract import BlockTables, PageScales
from nsa_core.decode.pages import quantize
from nsa_core.layer.rope import rope_table
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.step_data import StepData, step_data
from nsa_verify.problems.steps import Step

Outputs = dict[str, torch.Tensor]
Form = Callable[[StepData, Callable[[torch.Tensor], torch.Tensor]], Outputs]
STORES = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
SMALL, ODD, MANY = (4, 2, 16, 3, 18), (16, 8, 24, 3, 5), (6, 2, 8, 7, 9)  # l, d, l', n, w
MANY_SELECTED = (6, 2, 8, 11, 9)  # more blocks than the selection ranks in one pass
NO_OVERLAP = (8, 8, 24, 3, 30)  # l = d: compressed tokens do not overlap


def _step(
    name: str,
    geometry: tuple[int, ...],
    lengths: tuple[int, ...],
    new: tuple[int, ...],
    heads: int = 2,
    groups: int = 1,
    page: int | None = 16,
    dk: int = 4,
    dv: int = 3,
    **block_counts: int,
) -> Step:
    config = dataclasses.replace(config_of(heads, groups, dk, dv, geometry), **block_counts)
    return Step(Case(name, config, ()), lengths, new, max(new), page)


STEPS = {
    "ragged": _step(
        "ragged",
        SMALL,
        (67, 1, 0, 20),
        (1, 1, 0, 0),
        heads=6,
        groups=2,
        init_blocks=0,
        local_blocks=1,
    ),
    "odd": _step("odd", ODD, (190, 9), (1, 1), heads=17, page=48, init_blocks=0, local_blocks=0),
    "many blocks": _step(
        "many blocks", MANY, (150, 134, 133), (1, 1, 1), heads=6, groups=2, page=8, local_blocks=0
    ),
    "six initial": _step(
        "six initial", MANY_SELECTED, (150, 101), (1, 1), page=8, init_blocks=6, local_blocks=1
    ),
    "nine initial": _step(
        "nine initial", MANY_SELECTED, (150, 133), (1, 1), page=8, init_blocks=9, local_blocks=0
    ),
    "two of many": _step(
        "two of many", MANY, (77, 112), (2, 2), heads=4, groups=2, page=40, init_blocks=0
    ),
    "six sequences": _step(
        "six sequences",
        MANY,
        (24, 23, 6, 5, 16, 22),
        (1, 2, 1, 1, 2, 2),
        heads=3,
        groups=3,
        page=8,
    ),
    "codes": _step(
        "codes", MANY, (24, 23, 6, 5), (1, 2, 1, 1), heads=6, groups=3, page=8, dk=6, dv=4
    ),
    "five rings": _step(
        "five rings", MANY, (24, 23, 6, 5, 16), (1, 2, 1, 1, 2), groups=1, page=None
    ),
    "six rings": _step(
        "six rings", MANY, (24, 23, 6, 5, 16, 22), (1, 2, 1, 1, 2, 2), groups=1, page=None
    ),
    "wide": _step("wide", (1, 1, 4, 3, 5), (1, 7), (1, 1), page=8, dk=48),
    "six tokens": _step("six tokens", SMALL, (29, 2), (6, 2), heads=3, page=16),
    "two tokens": _step(
        "two tokens", ODD, (60, 9), (2, 1), heads=17, page=48, init_blocks=0, local_blocks=0
    ),
    "one key": _step(
        "one key",
        (4, 4, 4, 3, 5),
        (6,),
        (1,),
        page=4,
        num_selected_blocks=1,
        init_blocks=0,
        local_blocks=0,
    ),
    "full": _step("full", NO_OVERLAP, (24, 48), (1, 1), page=48),
    "odd heads": _step(
        "odd heads", SMALL, (40, 3), (2, 3), heads=3, groups=3, page=None, dk=6, window_size=1
    ),
    "three tokens": _step(
        "three tokens", SMALL, (39, 3, 21), (3, 3, 2), heads=4, groups=2, page=32
    ),
}


def fused(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor], fuse: int = 1) -> Outputs:
    """Run the step; ``fuse`` 0: in three launches."""
    stores = (apart(data.stores[name]) for name in STORES)
    span = dict(configs.pick("decode_span", 0)) | {"FUSE_STEP": fuse}
    o, blocks = forms.step(
        apart(data.q), data.gates, *stores, call=data.call, settings=(span, None)
    )
    return {"o": o, "blocks": blocks}


def three_launches(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run the step in three launches, as steps of several tokens are."""
    return fused(data, apart, 0)


def branches(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run cmp and win alone."""
    s, q = {name: apart(store) for name, store in data.stores.items()}, apart(data.q)
    o_cmp, lse_cmp = forms.cmp(q, s["k_cmp"], s["v_cmp"], call=data.call)
    o_win, lse_win = forms.win(q, s["k_win"], s["v_win"], call=data.call)
    return {"o_cmp": o_cmp, "lse_cmp": lse_cmp, "o_win": o_win, "lse_win": lse_win}


def selection(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run select with a given lse."""
    q, k = apart(data.q), apart(data.stores["k_cmp"])
    numbers = torch.linspace(0, 60, q.shape[0] * q.shape[1] * q.shape[2], dtype=q.dtype).sin() * 2
    lse = numbers.view(q.shape[0], q.shape[2], -1)
    return {"blocks": forms.select(q, k, lse, call=data.call)}


def selection_with_nan(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run select with a compressed key of NaN in every other page."""
    data.stores["k_cmp"][::2, 3] = torch.nan
    return selection(data, apart)


def selection_with_own_nan(
    data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]
) -> Outputs:
    """Run select with a NaN in a compressed key that does not reach beyond its block."""
    data.stores["k_cmp"][::2, 1] = torch.nan
    return selection(data, apart)


def invalid_blocks(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run sel with blocks that are unsorted, repeated, in the future or out of range."""
    batch, rows, groups = data.q.shape[0], data.q.shape[1], data.stores["k_sel"].shape[2]
    blocks = torch.tensor([[2, 0, 2], [-1, 0, 1], [1, 99, -7]], dtype=torch.int64)
    blocks = blocks[(torch.arange(batch * rows * groups) % 3)].view(batch, rows, groups, 3)
    o, lse = forms.sel(
        apart(data.q),
        apart(data.stores["k_sel"]),
        apart(data.stores["v_sel"]),
        blocks,
        call=data.call,
    )
    return {"o": o, "lse": lse}


def append(
    data: StepData, _: Callable[[torch.Tensor], torch.Tensor], rotate_raw: bool = True
) -> Outputs:
    """Append rows of one buffer to stores of -9; ``rotate_raw`` False: without rotary embedding."""
    (batch, m, heads, dk), groups, dv = data.q.shape, *data.stores["v_sel"].shape[2:]
    buffer = torch.linspace(
        -1, 1, batch * m * (heads * dk + 3 * groups * (dk + dv)), dtype=data.q.dtype
    )
    if data.call.scales is not None:
        buffer = _special_numbers(data.stores["k_sel"].dtype, len(buffer))
    parts = buffer.view(batch, m, -1).split(
        [heads * dk, *[groups * dk] * 3, *[groups * dv] * 3], -1
    )
    q, *keys_values = (
        part.unflatten(-1, (-1, dk if i < 4 else dv)) for i, part in enumerate(parts)
    )
    sizes = {
        "raw": (data.call.tables.raw.numel(), 2 if data.call.tables.raw.shape[1] == 1 else 1),
        "sel": data.stores["k_sel"].shape[:2],
    }
    sizes["win"] = sizes["raw"]
    paged = data.stores["k_sel"].dtype
    stores = {
        n: tuple(
            torch.full((*size, groups, d), -9.0, dtype=q.dtype if n == "raw" else paged)
            for d in (dk, dv)
        )
        for n, size in sizes.items()
    }
    table = rope_table(torch.arange(data.call.max_len), dk, 100.0, q.dtype)
    rope = (table.cos[:, 0], table.sin[:, 0]) if rotate_raw else None
    q = decode_append.append(
        q,
        tuple(keys_values[:3]),
        tuple(keys_values[3:]),
        stores["raw"],
        stores["sel"],
        stores["win"],
        rope=rope,
        rotate_raw=rotate_raw,
        call=data.call,
    )
    for b, new in enumerate(data.call.lengths - data.call.starts):
        q[b, int(new) :] = 0  # padding may hold anything
    return {"q": q} | {
        f"{kind}_{n}": x for n, pair in stores.items() for kind, x in zip("kv", pair)
    }


def append_past_the_end(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Append to a full sequence, as a replayed graph may."""
    data.call.starts.add_(1)
    data.call.lengths.add_(1)
    return append(data, apart)


def plain_append(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Append without rotary embedding."""
    return append(data, apart, False)


def compress(
    data: StepData,
    apart: Callable[[torch.Tensor], torch.Tensor],
    phi: str = "mlp",
    two_pages: bool = False,
) -> Outputs:
    """Compress the blocks of six sequences, of which four are complete, into pages of -9.

    ``phi`` is "mlp", "linear" or "mean". Keys are rotated. ``two_pages``: a block lies in at most
    two pages.
    """
    geometry, kind = data.call.geometry, data.q.dtype
    size, ring = geometry.compress_block_size, geometry.compress_block_size + 3

    def numbers(*shape: int, scale: float) -> torch.Tensor:
        return torch.linspace(-2, 3, math.prod(shape), dtype=kind).mul(scale).sin().view(shape)

    pages, tensors = [data.stores[name] for name in ("k_cmp", "v_cmp")], []
    for x in pages:
        units = x.shape[-1] + 5 * (phi == "mlp")
        shapes = [(size, x.shape[-1]), (units, size * x.shape[-1]), (units,)]
        shapes += [(x.shape[-1], units), (x.shape[-1],)]
        shapes = shapes[: {"mlp": 5, "linear": 3, "mean": 0}[phi]]
        weights = [numbers(*shape, scale=5 + i) for i, shape in enumerate(shapes)]
        table = data.call.tables.raw
        columns = table.shape[1]
        per_page = size if two_pages else -(-ring // columns)
        rows = numbers(table.numel(), per_page, *x.shape[2:], scale=40)
        between = torch.nn.functional.pad(rows, (0,) * 6 + (1, 1), value=torch.nan)[1:-1]
        tensors.append((between, tuple(apart(w) if w.dim() == 2 else w for w in weights)))
    out = [torch.full_like(x, -9.0) for x in pages]
    (k, phi_k), (v, phi_v) = tensors
    table = rope_table(torch.arange(data.call.max_len), out[0].shape[-1], 100.0, kind)
    rope = (table.cos[:, 0], table.sin[:, 0])
    decode_compress.compress(k, v, *out, phi_k, phi_v, rope=rope, call=data.call)
    return {"k_cmp": out[0], "v_cmp": out[1]}


def linear_compress(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Compress with a phi of kind linear."""
    return compress(data, apart, "linear")


def mean_compress(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Compress with the mean."""
    results = compress(data, apart, "mean")
    others = compress(data, apart, "mean", two_pages=True)
    return results | {f"two pages {name}": x for name, x in others.items()}


def ragged(data: StepData) -> StepData:
    """Return the rows of the step as runs of one token, those of the last sequence first."""
    call, (batch, m) = data.call, data.q.shape[:2]
    order = torch.arange(batch).flip(0).repeat_interleave(m)
    row = torch.arange(m).repeat(batch)
    starts = torch.minimum(call.starts[order] + row, call.lengths[order]).int()
    lengths = torch.minimum(starts + 1, call.lengths[order]).int()
    q, gates = (x[order, row][:, None] for x in (data.q, data.gates))
    call = dataclasses.replace(call, starts=starts, lengths=lengths, sequences=order.int())
    return dataclasses.replace(data, q=q, gates=gates, call=call)


def ragged_rows(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run every form on runs of one token."""
    return _every_form(ragged(data), apart)


def wrong_rows(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run every form on values that nobody has checked.

    The pages of two sequences are outside their pool. Two runs name no sequence, and one begins
    before token 0.
    """
    data = ragged(data)
    tables = BlockTables(*(table.clone() for table in data.call.tables))
    for table in tables:
        table[0], table[1] = table.numel(), -1
    data.call.sequences[1], data.call.sequences[3] = len(tables.sel), -1  # they complete blocks
    data.call.starts[4] = -1000
    call = dataclasses.replace(data.call, tables=tables)
    return _every_form(dataclasses.replace(data, call=call), apart)


def _every_form(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    results: Outputs = {}
    for form in (append, compress, linear_compress, fused, three_launches):
        results |= {f"{form.__name__} {n}": x for n, x in form(data, apart).items()}
    return results


def _special_numbers(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return codes of ``dtype``, the ties between them, NaN and infinities, times 1/4."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    codes = codes[codes.isfinite()].sort().values
    special = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=codes.dtype)
    numbers = torch.cat([special.repeat(20), codes, (codes[1:] + codes[:-1]) / 2]) / 4
    order = torch.arange(count) * 101 % len(numbers)
    return numbers[order]


def _quantized(data: StepData, dtype: torch.dtype, own: bool) -> StepData:
    """Return the step over codes; ``own``: each page has scales of its own, powers of 2."""
    groups, scales = data.stores["k_sel"].shape[2], []
    for i in range(3):
        exponents = torch.arange(64 * groups * 2) * (7 + 2 * i) % 6 - 4
        numbers = exponents.view(64, groups, 2).float().exp2()
        scales.append(numbers if own else numbers[:1].expand(64, -1, -1))
    stores = {
        name: quantize(x, scales[i // 2][: len(x), None, :, i % 2], dtype)
        for i, (name, x) in enumerate((name, data.stores[name]) for name in STORES)
    }
    call = dataclasses.replace(data.call, scales=PageScales(*scales))
    return dataclasses.replace(data, stores=stores, call=call)


def float8_pages(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run every form over e4m3 codes, and each page has scales of its own."""
    data = _quantized(ragged(data), torch.float8_e4m3fn, True)
    return {**_every_form(data, apart), **plain_append(data, apart)}


def int8_pages(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run every form over int8 codes with the same scales in all pages."""
    data = _quantized(data, torch.int8, False)
    return {**_every_form(data, apart), **plain_append(data, apart)}


def compress_past_the_end(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Compress a block after the last page, which is not written, and one beyond the angles."""
    data.call.starts[0] += 6
    data.call.lengths[0] += 6
    call = dataclasses.replace(data.call, max_len=15)
    data = dataclasses.replace(data, call=call)
    results = compress(data, apart)
    return results | {f"linear {n}": x for n, x in linear_compress(data, apart).items()}


def gates(data: StepData, apart: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
    """Run gates on rows with gaps between them, of a width that is no multiple of a tile."""
    (batch, m), heads, dim = data.q.shape[:2], data.q.shape[2], 21
    x = (
        torch.linspace(-2, 3, batch * m * (dim + 3), dtype=data.q.dtype)
        .sin()
        .view(batch, m, -1)[..., :dim]
    )
    weight = torch.linspace(1, 9, 3 * heads * dim, dtype=data.q.dtype).cos().view(-1, dim)
    bias = torch.linspace(-1, 1, 3 * heads, dtype=data.q.dtype)
    return {
        "gates": decode_gates.gates(apart(x), apart(weight), apart(bias[None])[0], call=data.call)
    }


@dataclasses.dataclass(frozen=True)
class TinyStep:
    """One form on one step; with 1000 ``multiprocessors`` every tile is a split."""

    form: Form
    step: str
    multiprocessors: int
    dtype: torch.dtype = torch.float64
    tiles: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict, hash=False)

    def calls(self) -> None:
        """Run the form."""
        data = step_data(STEPS[self.step], self.dtype)
        with (
            mock.patch.object(launch, "multiprocessors", return_value=self.multiprocessors),
            mock.patch.object(forms, "allocate", _allocate_dirty),
        ):
            self.form(data, apart)


def _allocate_dirty(*args: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Allocate scratch whose floats hold old values, as memory that is not zeroed does."""
    floats, ints = launch.allocate(*args)  # type: ignore[arg-type]
    for x in floats:
        x.fill_(7.0)
    return floats, ints


CASES = {
    "selection, fp32": TinyStep(selection, "nine initial", 3, torch.float32),
    "selection with nan, fp32": TinyStep(selection_with_nan, "six initial", 3, torch.float32),
    "float8_pages, fp16": TinyStep(float8_pages, "codes", 3, torch.float16),
    "int8_pages, fp16": TinyStep(int8_pages, "codes", 1000, torch.float16),
} | {
    f"{form.__name__}, {step}, {count}": TinyStep(form, step, count)
    for form, step, count in (
        (append, "three tokens", 3),
        (append, "odd heads", 3),
        (append_past_the_end, "full", 3),
        (plain_append, "ragged", 3),
        (plain_append, "odd heads", 3),
        (compress, "six sequences", 3),
        (linear_compress, "six sequences", 3),
        (mean_compress, "six sequences", 3),
        (mean_compress, "six rings", 3),
        (mean_compress, "wide", 3),
        (compress, "five rings", 3),
        (linear_compress, "six rings", 3),
        (linear_compress, "wide", 3),
        (compress_past_the_end, "six sequences", 3),
        (compress, "wide", 3),
        (compress, "six rings", 3),
        (ragged_rows, "six sequences", 3),
        (ragged_rows, "three tokens", 1000),
        (wrong_rows, "six sequences", 3),
        (float8_pages, "codes", 3),
        (int8_pages, "codes", 1000),
        (gates, "three tokens", 3),
        (gates, "odd heads", 3),
        (selection, "ragged", 3),
        (selection, "many blocks", 1000),
        (selection_with_nan, "many blocks", 3),
        (selection_with_own_nan, "many blocks", 3),
        (selection, "six initial", 3),
        (selection, "two of many", 3),
        (selection, "odd", 1000),
        (selection, "one key", 3),
        (fused, "two tokens", 1000),
        (invalid_blocks, "three tokens", 1000),
        (branches, "ragged", 3),
        (branches, "odd", 1000),
        (branches, "six tokens", 3),
        (branches, "three tokens", 3),
        (branches, "odd heads", 3),
        (fused, "full", 3),
        (fused, "ragged", 1000),
        (fused, "three tokens", 3),
        (fused, "odd", 3),
        (fused, "many blocks", 1000),
        (three_launches, "ragged", 1000),
    )
}
