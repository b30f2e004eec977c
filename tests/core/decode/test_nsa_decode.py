"""nsa_decode: equal to the layer on whole sequences, compiled, and its errors.

The histories of nsa_verify judge pages that are moved, shared, freed and reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

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
)
from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import compute_gates
from nsa_core.layer.rope import rope_table

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


def rope_of(attn: NSAttention, positions: int = 80) -> Any:
    config = attn.config
    if not config.rope:
        return None
    weight = attn.out.weight
    table = rope_table(torch.arange(positions), config.qk_dim, config.frequencies, weight.dtype)
    return table.cos[:, 0], table.sin[:, 0]


def decoded(attn: NSAttention, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """Run the projections of a layer around nsa_decode."""
    q, k, v = attn.heads(x)
    pairs = [part[0] if len(part) == 1 else tuple(part) for part in (k, v)]
    gates = compute_gates(attn.gate, x)
    o = nsa_decode(
        q, *pairs, gates, *arguments, config=attn.config, phi=(attn.phi_k, attn.phi_v),
        rope=rope_of(attn), max_len=80, **options,
    )  # fmt: skip
    return attn.out(o.flatten(-2))


def rows_of(counts: tuple[int, ...], lengths: list[int], padding: int = PADDING) -> DecodeRows:
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    return decode_rows(ends, torch.tensor(lengths).int(), sum(counts) + padding)


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


def test_other_arguments_that_do_not_fit() -> None:
    attn = layer_of()
    pages, rows = pages_of(attn), rows_of((1, 1), [1, 1], 0)
    config, x = attn.config, torch.randn(2, attn.config.dim, dtype=torch.float64)
    q, k, v = attn.heads(x)
    call = [q, tuple(k), tuple(v), torch.rand(2, 4, 3, dtype=torch.float64), pages, rows]
    plan = resolve(config, dtype="float64", phase="decode", page_size=32)
    phi = (attn.phi_k, attn.phi_v)
    cos = torch.zeros(30, 4, dtype=torch.float64)
    for options, message in (
        ({}, "requires grad"),
        ({"config": config}, "pass phi="),
        ({"phi": phi, "plan": plan}, "plan is for page_size 32"),
        ({"phi": phi, "plan": plan, "backends": "sdpa"}, "plan and backends"),
        ({"phi": phi, "rope": (cos, cos)}, "at least max_len 80 positions"),
        ({"phi": phi, "max_len": 0}, "max_len"),
        (
            {"phi": phi, "config": dataclasses.replace(config, window_size=60)},
            "pages.win has room for 55",
        ),
    ):
        with torch.set_grad_enabled(not options), pytest.raises(InvalidInput, match=message):
            nsa_decode(*call, **{"config": config, **options})
    with torch.no_grad(), pytest.raises(InvalidInput, match="one tensor or three"):
        nsa_decode(q, k[:2], *call[2:], config=config, phi=phi)
