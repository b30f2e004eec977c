"""nsa_decode: equal to the layer on whole sequences, compiled, and its errors.

The histories of nsa_verify judge pages that are moved, shared, freed and reused.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from caches import OPTIONS, layer_of
from nsa_core import (
    DecodeRows,
    LayerPages,
    NSAttention,
    PagedKV,
    decode_rows,
    nsa_attention,
    nsa_decode,
    resolve,
    rope_angles,
)
from nsa_core.contract import BlockTables, DecodeCall
from nsa_core.decode import chunks as decode_chunks
from nsa_core.decode import layer_step
from nsa_core.decode import op as decode_op
from nsa_core.decode import run as decode_run
from nsa_core.decode.checks import check_values
from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import compute_gates
from nsa_core.layer.phi.kinds import make_phi
from nsa_core.torch_ops import decode_kernel
from nsa_core.torch_ops.backend_call import record_dispatch

LENGTHS = (70, 45)
STEPS = ((30, 1), (1, 7), (5, 1), (1, 1), (0, 3), (13, 12), (1, 20), (19, 0))
PADDING = 2


def pages_of(attn: NSAttention, seed: int = 1) -> LayerPages:
    """Pages of NaN for two sequences; sel and raw have the layout [P, G, page, D]."""
    config, generator = attn.config, torch.Generator().manual_seed(seed)

    def part(rows: int, columns: int, heads_first: bool) -> PagedKV:
        number = 2 * columns + 3
        table = torch.randperm(number, generator=generator)[: 2 * columns].view(2, columns).int()
        stores = []
        for width in (config.qk_dim, config.v_dim):
            shape = [number, rows, config.n_kv_heads, width]
            if heads_first:
                shape[1:3] = shape[2:0:-1]
            store = torch.full(shape, torch.nan, dtype=attn.out.weight.dtype)
            stores.append(store.transpose(1, 2) if heads_first else store)
        return PagedKV(stores[0], stores[1], table)

    return LayerPages(part(5, 4, False), part(16, 5, True), part(5, 11, False), part(3, 16, True))


def decoded(attn: NSAttention, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Run the projections of a layer around nsa_decode."""
    q, k, v = attn.heads(x)
    gates = compute_gates(attn.gate, x)
    phi, angles = (attn.phi_k, attn.phi_v), rope_angles(attn.config, 80, dtype=x.dtype)
    options = {"config": attn.config, "phi": phi, "rope": angles, "max_len": 80, **options}
    o = nsa_decode(q, k, v, gates, *arguments, **options)
    return attn.out(o.flatten(-2))


def rows_of(counts: tuple[int, ...], lengths: list[int], padding: int = PADDING) -> DecodeRows:
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    rows = sum(counts) + padding
    return decode_rows(ends, torch.tensor(lengths).int(), rows, (ends, lengths))


def run(
    attn: NSAttention, step: Callable[..., torch.Tensor] = decoded
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Decode both sequences in STEPS; return the outputs, and those of the whole sequences."""
    generator = torch.Generator().manual_seed(0)
    dim, dtype = attn.config.dim, attn.out.weight.dtype
    xs = [torch.randn(n, dim, generator=generator).to(dtype) for n in LENGTHS]
    pages, done, outputs = pages_of(attn), [0, 0], [[], []]
    padding = torch.full((PADDING, dim), torch.nan, dtype=dtype)
    with torch.no_grad():
        for counts in STEPS:
            grown = [n + count for n, count in zip(done, counts)]
            parts = [x[a:b] for x, a, b in zip(xs, done, grown)]
            y = step(attn, torch.cat([*parts, padding]), pages, rows_of(counts, grown))
            assert (y[-PADDING:] == 0).all()
            for output, part in zip(outputs, y.split([*counts, PADDING])):
                output.append(part)
            done = grown
        return [torch.cat(x) for x in outputs], [attn(x[None])[0] for x in xs]


@pytest.mark.parametrize("option", ["mlp", *OPTIONS])
def test_ragged_steps_equal_the_forward_of_whole_sequences(option: str) -> None:
    attn = layer_of(**OPTIONS.get(option, {}))
    for actual, expected in zip(*run(attn)):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_large_ragged_batch_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary memory does not grow with the rows, whatever the backend."""
    attn = layer_of()
    whole_batch, _ = run(attn)
    sizes: list[int] = []

    def attend(*arguments: Any) -> torch.Tensor:
        sizes.append(len(arguments[2]))
        return layer_step.attend(*arguments)

    def compress(*arguments: Any, **options: Any) -> None:
        sizes.append(len(arguments[4].starts))
        layer_step.compress(*arguments, **options)

    monkeypatch.setattr(decode_run, "attend", attend)
    monkeypatch.setattr(decode_run, "compress", compress)
    monkeypatch.setattr(decode_run, "_runs_per_part", lambda *_: 3)
    parts, _ = run(attn)
    assert max(sizes) == 3
    assert min(sizes) < 3
    for actual, expected in zip(parts, whole_batch):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("longest", [5, 8192])
def test_chunks_of_prompts_run_the_prefill_kernels(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows of a step, before and after them, run the decode forms."""
    attn, windows = layer_of(), []
    monkeypatch.setattr(decode_chunks, "MIN_ROWS", {"cpu": 3})
    monkeypatch.setattr(decode_chunks, "MAX_CHUNK_ROWS", longest)

    def step(*arguments: Any) -> torch.Tensor:
        with record_dispatch() as trace:
            y = decoded(*arguments)
        windows.append("".join(call.direction[0] for call in trace if call.slot == "win"))
        return y

    for actual, expected in zip(*run(attn, step)):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    # Calls of win in each of STEPS; there are rows of padding after the chunks.
    expected_of = {
        5: ["ffffffd", "dffd", "fd", "d", "fd", "ffffffd", "dffffd", "ffffd"],
        8192: ["fd", "dfd", "fd", "d", "fd", "ffd", "dfd", "fd"],
    }
    assert windows == expected_of[longest]


def test_a_backend_without_partial_queries_runs_its_decode_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_run, "partial_plan", lambda *_: None)
    with record_dispatch() as trace:
        outputs = run(layer_of())
    assert {call.direction for call in trace if call.slot == "win"} >= {"decode"}
    for actual, expected in zip(*outputs):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_cuda_graph_takes_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = layer_of(rope=False)
    arguments, options = call_of(attn)
    assert arguments[-1].chunks == ((0, 0, 0, 20),)
    monkeypatch.setattr(decode_run, "is_capturing", lambda device: True)
    with torch.no_grad(), pytest.raises(InvalidInput, match="decode_rows without on_host"):
        nsa_decode(*arguments, **options)


def test_the_parts_follow_from_the_memory_of_a_run() -> None:
    plan = resolve(layer_of().config, dtype="float64", phase="decode", page_size=16)
    pages = pages_of(layer_of())
    q = torch.empty(4, 4, 8, dtype=torch.float64)
    counts = [decode_run._runs_per_part(plan, q, pages, n) for n in (80, 1 << 20, 1 << 21)]
    assert counts[0] > counts[1] == 2 * counts[2]
    fused = dataclasses.replace(plan, fused={"step": None})  # it copies no keys
    assert decode_run._runs_per_part(fused, q, pages, 80) > counts[0]


@pytest.mark.parametrize("option", ["mlp", "mean", "one pair, rotary before phi"])
def test_it_is_one_operator_under_compile(option: str) -> None:
    attn = layer_of(**OPTIONS.get(option, {}))
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    torch._dynamo.reset()
    step = torch.compile(decoded, fullgraph=True, backend=backend, dynamic=True)
    compiled, _ = run(attn, step)
    eager, _ = run(attn)
    assert graphs
    assert all(names.count("nsa_core.decode.default") == 1 for names in graphs)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager))


def test_the_default_phi_is_the_mean() -> None:
    """It equals nsa_attention, whose compressed keys are means too."""
    attn = layer_of(**OPTIONS["mean"], rope=False)
    config, pages = attn.config, pages_of(attn)
    assert rope_angles(config, 80) is None
    q = torch.randn(70, config.n_heads, config.qk_dim, dtype=torch.float64)
    k = torch.randn(70, config.n_kv_heads, config.qk_dim, dtype=torch.float64)
    v = torch.randn(70, config.n_kv_heads, config.v_dim, dtype=torch.float64)
    gates = torch.rand(70, config.n_heads, 3, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 70, 70], dtype=torch.int32)
    rows = decode_rows(cu_seqlens, torch.tensor([70, 0], dtype=torch.int32), 70)
    o = nsa_decode(q, k, v, gates, wide(pages), rows, config=config)
    expected = nsa_attention(q[None], k[None], v[None], gates[None], config=config)[0]
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)


def wide(pages: LayerPages) -> LayerPages:
    """Pages whose tables of win and raw have room for 80 new tokens."""
    parts = {}
    for name in ("win", "raw"):
        part = getattr(pages, name)
        columns = -(-120 // part.rows)
        table = torch.arange(2 * columns, dtype=torch.int32).view(2, columns)
        shapes = [(2 * columns, *x.shape[1:]) for x in (part.k, part.v)]
        k, v = (torch.full(shape, torch.nan, dtype=part.k.dtype) for shape in shapes)
        parts[name] = PagedKV(k, v, table)
    return pages._replace(**parts)


@torch.no_grad()
def test_a_sequence_may_begin_after_pages_that_another_one_fills_in_the_step() -> None:
    """Engines share the pages of a prefix before the step that writes them has run."""
    attn = layer_of(compress="mlp")
    config, x = attn.config, torch.randn(37, attn.config.dim, dtype=torch.float64)
    alone, parts = attn(x[None])[0], []
    shared = config.geometry.num_compressed(32)
    for rows, columns, same in ((1, 20, shared), (16, 5, 2), (16, 5, 2), (16, 5, 2)):
        table = torch.arange(2 * columns, dtype=torch.int32).view(2, columns)
        table[1, :same] = table[0, :same]
        shape = (2 * columns, rows, config.n_kv_heads)
        widths = (config.qk_dim, config.v_dim)
        stores = (torch.full((*shape, n), torch.nan, dtype=torch.float64) for n in widths)
        parts.append(PagedKV(*stores, table))
    cu_seqlens = torch.tensor([0, 37, 42], dtype=torch.int32)
    rows = decode_rows(cu_seqlens, torch.tensor([37, 37], dtype=torch.int32), 42)
    y = decoded(attn, torch.cat((x, x[32:])), LayerPages(*parts), rows)
    torch.testing.assert_close(y[:37], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y[37:], alone[32:], rtol=1e-12, atol=1e-12)


def test_a_slice_of_a_table_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines keep one table for the longest sequence, and pass the columns that a step needs."""

    def sliced(attn: NSAttention, x: torch.Tensor, pages: LayerPages, rows: DecodeRows) -> Any:
        parts = [p._replace(table=torch.cat((p.table,) * 2, 1)) for p in pages]
        columns = [p.table.shape[1] // 2 for p in parts]
        slices = [p._replace(table=p.table[:, :n]) for p, n in zip(parts, columns)]
        assert not any(p.table.is_contiguous() for p in slices)
        return decoded(attn, x, LayerPages(*slices), rows)

    monkeypatch.setattr(decode_kernel, "_contiguous", None)
    for actual, expected in zip(*run(layer_of(), sliced)):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["starts", "lengths", "sequences", "win"])
def test_a_backend_gets_the_metadata_contiguous(name: str) -> None:
    table = torch.zeros(3, 4, dtype=torch.int32)[:, :2]  # its rows are contiguous
    tables, column = BlockTables(*[table] * 4), torch.arange(6, dtype=torch.int32)[::2]
    options: dict[str, Any] = dict.fromkeys(("starts", "lengths", "sequences"), column.clone())
    call = DecodeCall(layer_of().config.geometry, 1.0, tables=tables, max_len=9, **options)
    calls: list[DecodeCall] = []
    kernel = decode_kernel.DecodeKernel("toy", "compress", lambda *_, call: calls.append(call))
    kernel(torch.zeros(1), call=call)
    assert calls[0] is call
    if name == "win":
        change: Any = {"tables": tables._replace(win=torch.zeros(2, 3).int().t())}
    else:
        change = {name: column}
    kernel(torch.zeros(1), call=dataclasses.replace(call, **change))
    passed = calls[1].tables.win if name == "win" else getattr(calls[1], name)
    assert passed.is_contiguous()
    assert passed.tolist() == (table.tolist() if name == "win" else [0, 2, 4])


def test_an_explicit_plan_and_backends() -> None:
    attn = layer_of()
    plan = resolve(attn.config, dtype="float64", phase="decode", page_size=16)
    for option in ({"plan": plan}, {"backends": "sdpa"}):
        for actual, expected in zip(*run(attn, lambda *a, o=option: decoded(*a, **o))):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def _table(branch: str, sequence: int, column: int, page: int) -> Callable[..., Any]:
    def change(pages: LayerPages, rows: DecodeRows) -> Any:
        getattr(pages, branch).table[sequence, column] = page
        return pages, rows

    return change


def _rows(**fields: list[int]) -> Callable[..., Any]:
    def change(pages: LayerPages, rows: DecodeRows) -> Any:
        new = {name: torch.tensor(x, dtype=torch.int32) for name, x in fields.items()}
        return pages, rows._replace(**new)

    return change


def _pages(**parts: Callable[[PagedKV], PagedKV]) -> Callable[..., Any]:
    def change(pages: LayerPages, rows: DecodeRows) -> Any:
        return pages._replace(**{n: f(getattr(pages, n)) for n, f in parts.items()}), rows

    return change


# The step adds tokens 20 .. 22 to the first sequence and token 43 to the second one.
WRONG = {
    "a page beyond the pool": (
        _table("sel", 0, 1, 99),
        "pages.sel.table must name one of 13 pages",
    ),
    "a negative page": (_table("win", 1, 5, -1), "pages.win.table must name one of"),
    "a page of two sequences": (_table("sel", 0, 1, 7), "used twice"),
    "a compressed page of two sequences": (_table("cmp", 1, 1, 0), "used twice"),
    "no such sequence": (_rows(sequences=[0, 0, 2, 1]), "rows.sequences must be from 0 to 1"),
    "a position below 0": (_rows(starts=[-1, 21, 22, 43]), "rows.starts must be from 0"),
    "lengths beyond max_len": (
        _rows(starts=[20, 21, 22, 90], lengths=[21, 22, 23, 91]),
        "rows.lengths must be at most max_len 80",
    ),
    "two rows of one token": (
        _rows(starts=[20, 21, 21, 43], lengths=[21, 22, 22, 44]),
        "decode_rows",
    ),
    "a row of two tokens": (_rows(lengths=[21, 22, 24, 44]), "or one more"),
    "a chunk of other tokens": (
        lambda pages, rows: (pages, rows._replace(chunks=(decode_chunks.Chunk(0, 0, 21, 3),))),
        r"rows.chunks has Chunk.row=0, sequence=0, start=21, rows=3., but its rows are other",
    ),
    "a table that is too short": (
        _pages(sel=lambda x: x._replace(table=x.table[:, :4])),
        "pages.sel has room for 64 tokens a sequence .4 columns of 16., max_len 80 needs 80",
    ),
    "too few pages of the window": (
        _pages(win=lambda x: x._replace(table=x.table[:, :4].contiguous())),
        "pages.win has room for 20",
    ),
    "window overwritten in the step": (
        _pages(win=lambda x: PagedKV(x.k[:, :2], x.v[:, :2], x.table)),
        "pages.win.table has 11 columns of 2 rows, too few",
    ),
    "pages that cut a block": (
        _pages(sel=lambda x: PagedKV(x.k[:, :15], x.v[:, :15], x.table)),
        "multiple of select_block_size 16",
    ),
    "a head too many": (
        _pages(raw=lambda x: x._replace(k=torch.cat((x.k, x.k), 2))),
        "config.n_kv_heads is 2",
    ),
    "columns with gaps": (
        _pages(raw=lambda x: x._replace(k=x.k.mT.contiguous().mT)),
        "the columns of pages.raw.k must be contiguous",
    ),
    "win in the pages of sel": (
        lambda pages, rows: (pages._replace(win=pages.sel), rows),
        "pages.sel.[kv] and pages.win.[kv] share memory",
    ),
    "raw in the pages of sel": (
        lambda pages, rows: (pages._replace(raw=pages.sel), rows),
        "pages.sel.[kv] and pages.raw.[kv] share memory",
    ),
    "values in the pages of keys": (
        _pages(sel=lambda x: x._replace(v=x.k[..., :6])),
        "pages.sel.k and pages.sel.v share memory",
    ),
    "heads that share a row": (
        _pages(win=lambda x: x._replace(v=x.v[:, :, :1].expand_as(x.v))),
        "pages.win.v and pages.win.v share memory",
    ),
    "no page": (_pages(cmp=lambda x: x._replace(k=x.k[:0], v=x.v[:0])), "pages.cmp.k has no page"),
    "a table without columns": (
        _pages(cmp=lambda x: x._replace(table=x.table[:, :0])),
        r"pages.cmp has no room for a token: k is \[.*\], and the table \[2, 0\]",
    ),
    "int64 table": (
        _pages(cmp=lambda x: x._replace(table=x.table.long())),
        "pages.cmp.table",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pages_and_rows_are_refused_before_anything_is_written(name: str) -> None:
    change, message = WRONG[name]
    attn = layer_of()
    pages = pages_of(attn)
    tables = {
        n: torch.arange(p.table.numel(), dtype=torch.int32).view_as(p.table)
        for n, p in pages._asdict().items()
    }
    pages = LayerPages(**{n: p._replace(table=tables[n]) for n, p in pages._asdict().items()})
    rows = rows_of((3, 1), [23, 44], 0)
    pages, rows = change(pages, rows)
    x = torch.randn(4, attn.config.dim, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(InvalidInput, match=message):
        decoded(attn, x, pages, rows)
    for part in pages:
        assert part.k.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x._replace(table=x.table[0]), "pages.sel.table must be .*, got .5."),
        (lambda x: x._replace(k=x.k[:, 0, 0, 0]), "pages.sel.k must be .*, got .13."),
        (lambda x: x._replace(table=x.table.tolist()), "pages.sel.table must be a tensor, got li"),
    ],
    ids=["table of one sequence", "pages without rows", "list as table"],
)
def test_pages_that_give_no_default_of_max_len_are_named(change: Any, message: str) -> None:
    attn = layer_of()
    pages, rows = _pages(sel=change)(pages_of(attn), rows_of((3, 1), [3, 1], 0))
    x = torch.randn(4, attn.config.dim, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(InvalidInput, match=message):
        decoded(attn, x, pages, rows, max_len=None)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_the_check_of_values_does_not_grow_with_the_pool() -> None:
    """A server's pool has millions of compressed tokens, and its CPU checks each step."""
    pages, rows = pages_of(layer_of()), rows_of((3, 1), [23, 44], 0)
    pool = [x.new_empty(1 << 16, *x.shape[1:]) for x in pages.cmp[:2]]
    pages = pages._replace(cmp=PagedKV(*pool, pages.cmp.table))
    geometry = layer_of().config.geometry
    call = DecodeCall(geometry, 1.0, rows.starts, rows.lengths, pages.tables, 80, rows.sequences)
    with Largest() as largest:
        check_values(pages, call, (), dict.fromkeys(LayerPages._fields, (None, None)))
    assert 0 < largest.elements < 1000


class Outer(torch.nn.Module):
    """A phi of the caller that returns one row for all heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((1, 2), keepdim=True)


@pytest.mark.parametrize("option", ["one pair, rotary before phi", "mean"])
def test_branches_with_the_same_rows_may_share_pages(option: str) -> None:
    """win is sel; raw is sel too, if it gets rotated keys."""
    attn = layer_of(**OPTIONS[option] | {"shared_kv": True})
    before_phi = attn.config.rope_before_compress

    def step(attn: NSAttention, x: torch.Tensor, pages: LayerPages, rows: DecodeRows) -> Any:
        shared = {"win": pages.sel} | ({"raw": pages.sel} if before_phi else {})
        return decoded(attn, x, pages._replace(**shared), rows)

    for actual, expected in zip(*run(attn, step)):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    if not before_phi:
        before_phi = True  # raw would get keys that are not rotated
        with pytest.raises(InvalidInput, match=r"pages.sel.k and pages.raw.k share memory"):
            run(attn, step)


@pytest.mark.parametrize("sequence", [2, 2**31 - 1, -1, -(2**31)])
def test_a_wrong_sequence_stays_inside_the_tables(
    sequence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's values are not read, and an index outside a table would end its process."""
    attn = layer_of()
    rows = rows_of((20, 0), [20, 0], 0)
    rows.sequences[3:] = sequence
    monkeypatch.setattr(decode_run, "check_values", lambda *_: None)
    with torch.no_grad():
        decoded(attn, torch.randn(20, attn.config.dim).double(), wide(pages_of(attn)), rows)


def test_other_arguments_that_do_not_fit() -> None:
    attn = layer_of()
    pages, rows = pages_of(attn), rows_of((1, 1), [1, 1], 0)
    config, x = attn.config, torch.randn(2, attn.config.dim, dtype=torch.float64)
    q, k, v = attn.heads(x)
    call = [q, k, v, torch.rand(2, 4, 3, dtype=torch.float64), pages, rows]
    plan = resolve(config, dtype="float64", phase="decode", page_size=32)
    phi, rope = (attn.phi_k, attn.phi_v), rope_angles(config, 80, dtype=torch.float64)
    right = {"config": config, "phi": phi, "rope": rope}
    short = rope_angles(config, 30, dtype=torch.float64)
    other = [make_phi("mlp", layer_of(compress_stride=1).config.geometry, 8), attn.phi_v]
    for options, message in (
        ({}, "requires grad"),
        ({"phi": None}, "pass phi="),
        ({"plan": plan}, "plan is for page_size 32"),
        ({"plan": plan, "backends": "sdpa"}, "plan and backends"),
        ({"rope": short}, "at least max_len 80 positions"),
        ({"rope": None}, "config.rope is True, but rope is None: .*rope_angles"),
        (
            {"config": dataclasses.replace(config, rope=False)},
            "config.rope is False, but rope is given",
        ),
        ({"phi": [Outer(), attn.phi_v]}, r"phi.0. must return .2, 1, 2, 8. torch.float64 .* got"),
        ({"rope": True}, "rope must be cos and sin, .* got bool"),
        ({"rope": ("cos", "sin")}, "rope.cos and rope.sin must be tensors, got str"),
        ({"max_len": 0}, "max_len"),
        ({"phi": attn.phi_k}, "phi must be two modules, .* got MLPPhi"),
        (
            {"phi": other},
            "phi.0. is 'mlp' with l=8, d=1, D=8, but config needs 'mlp' with l=8, d=4",
        ),
        (
            {"phi": [make_phi("linear", config.geometry, 8)] * 2},
            "phi.0. is 'linear' .* config needs 'mlp'",
        ),
        ({"phi": [attn.phi_k, make_phi("mlp", config.geometry, 9)]}, "phi.1. .* D=9, .* D=6"),
        (
            {"config": dataclasses.replace(config, window_size=60)},
            "pages.win has room for 55",
        ),
    ):
        with torch.set_grad_enabled(not options), pytest.raises(InvalidInput, match=message):
            nsa_decode(*call, **{**right, **options})
    for place, wrong, message in (
        (1, k[:2], "k must be one tensor or three .cmp, sel, win., got list of 2"),
        (2, None, "v must be one tensor or three .cmp, sel, win., got NoneType"),
        (4, pages._asdict(), "pages must be a nsa_core.LayerPages, got dict"),
        (
            4,
            pages._replace(win=tuple(pages.win)),
            "pages.win must be a nsa_core.PagedKV, got tuple",
        ),
        (5, tuple(rows), "rows must be a nsa_core.DecodeRows, got tuple: .*decode_rows"),
    ):
        with torch.no_grad(), pytest.raises(InvalidInput, match=message):
            nsa_decode(*call[:place], wrong, *call[place + 1 :], **right)


@pytest.mark.parametrize(
    ("cu_seqlens", "lengths", "rows", "message"),
    [
        ([0, 2, 4], [7], 4, "cu_seqlens must be .B . 1. and lengths .B."),
        ([0], [], 0, "for B >= 1 sequences"),
        ([0, 2, 9], [2, 7], 4, "cu_seqlens must be at most rows = 4, got 9 at .2."),
        ([1, 2, 4], [2, 7], 4, "cu_seqlens must begin with 0, got 1"),
        ([0, 3, 2], [3, 7], 4, "cu_seqlens must not fall"),
        ([0, 2, 4], [2, 1], 4, "lengths must be at least the new tokens, .* got 1 at .1."),
        ([0, 2, 4], [2, 7], 4.0, "rows must be an integer"),
        ([0, 2, 4], [2.0, 7.0], 4, "lengths must be int32"),
    ],
)
def test_decode_rows_refuses_wrong_lengths(
    cu_seqlens: list[int], lengths: list[float], rows: Any, message: str
) -> None:
    kind = torch.float32 if lengths == [2.0, 7.0] and type(lengths[0]) is float else torch.int32
    with pytest.raises(InvalidInput, match=message):
        decode_rows(
            torch.tensor(cu_seqlens, dtype=torch.int32), torch.tensor(lengths, dtype=kind), rows
        )


@pytest.mark.parametrize(
    "on_host",
    [
        ([0, 2, 4], [7]),
        ([0, 4], [2, 7]),
        ([1, 2, 4], [2, 7]),
        ([0, 3, 2], [3, 7]),
        ([0, 2, 5], [2, 7]),
        ([0, 2, 4], [2, 1]),
        ([0, 2, 4], [2.0, 7.0]),
        ([0, 2, 4],),
        5,
    ],
)
def test_decode_rows_refuses_wrong_integers_on_the_host(on_host: Any) -> None:
    cu_seqlens, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [2, 7]))
    with pytest.raises(InvalidInput, match=r"on_host must be .* for 2 sequences and 4 rows .* got"):
        decode_rows(cu_seqlens, lengths, 4, on_host)


def test_padding_may_lie_at_the_end_of_a_full_sequence() -> None:
    attn = layer_of()
    x = torch.randn(1, attn.config.dim, dtype=torch.float64)
    rows = DecodeRows(*(torch.tensor([n], dtype=torch.int32) for n in (0, 80, 80)))
    with torch.no_grad():
        assert (decoded(attn, x, pages_of(attn), rows) == 0).all()


def _hooked(phi: torch.nn.Module) -> None:
    phi.register_forward_hook(lambda module, args, y: 100 * y)


def _inner_hook(phi: torch.nn.Module) -> None:
    phi.down.register_forward_pre_hook(lambda module, args: (3 * args[0],))


class _Double(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _parametrized(phi: torch.nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(phi.down, "weight", _Double())


def _replaced(phi: torch.nn.Module) -> None:
    phi.down = torch.nn.Sequential(phi.down, torch.nn.Tanh())


def call_of(attn: NSAttention) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of nsa_decode for a prompt of 20 tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, attn.config.dim, dtype=torch.float64, generator=generator)
    gates = torch.rand(20, 4, 3, dtype=torch.float64, generator=generator)
    options = {"config": attn.config, "phi": (attn.phi_k, attn.phi_v)}
    with torch.no_grad():
        heads = attn.heads(x)
    return [*heads, gates, wide(pages_of(attn)), rows_of((20, 0), [20, 0], 0)], options


@pytest.mark.parametrize("change", [_hooked, _inner_hook, _parametrized, _replaced])
def test_the_operator_takes_a_phi_that_its_parameters_define(change: Callable[..., None]) -> None:
    attn = layer_of(rope=False)
    change(attn.phi_v)
    arguments, options = call_of(attn)
    torch._dynamo.reset()
    compiled = torch.compile(nsa_decode, fullgraph=True, backend="eager")
    message = r"phi\[1\].*without hooks, parametrizations and replaced layers"
    with torch.no_grad(), pytest.raises(Exception, match=message):
        compiled(*arguments, **options)


def test_a_call_has_no_gradient_compiled_too() -> None:
    attn = layer_of(rope=False)
    torch._dynamo.reset()
    for step in (nsa_decode, torch.compile(nsa_decode, fullgraph=True, backend="aot_eager")):
        arguments, options = call_of(attn)
        assert not step(*arguments, **options).requires_grad


@pytest.mark.slow
def test_a_compiled_function_calls_nsa_decode_eagerly_with_a_hooked_phi() -> None:
    attn = layer_of(rope=False)
    _hooked(attn.phi_k)
    outputs = []
    torch._dynamo.reset()
    for step in (nsa_decode, torch.compile(nsa_decode, backend="eager")):
        arguments, options = call_of(attn)
        with torch.no_grad():
            outputs.append(step(*arguments, **options))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_a_compiled_call_keeps_the_determinism_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    attn, resolved = layer_of(), []

    def default_plan(*arguments: Any) -> Any:
        resolved.append(arguments[-1])
        return decode_run.default_plan(*arguments)

    monkeypatch.setattr(decode_op, "default_plan", default_plan)
    decode_op._plan.cache_clear()
    torch._dynamo.reset()
    options = {"dtype": "float64", "phase": "decode", "page_size": 16}
    plan = resolve(attn.config, deterministic=True, **options)
    step = torch.compile(decoded, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, attn.config.dim, dtype=torch.float64)
    with torch.no_grad():
        step(attn, x, wide(pages_of(attn)), rows_of((20, 0), [20, 0], 0), plan=plan)
    decode_op._plan.cache_clear()
    assert resolved == [True]


def test_the_operator_keeps_no_weight_alive() -> None:
    attn = layer_of()
    torch._dynamo.reset()
    run(attn, torch.compile(decoded, fullgraph=True, backend="aot_eager", dynamic=True))
    modules = [
        decode_op._phi(of, 8, "mlp", attn.config.geometry, threading.get_ident()) for of in "kv"
    ]
    assert all(x.device.type == "meta" for module in modules for x in module.parameters())
