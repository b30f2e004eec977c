"""Integer metadata of any strides: the bits of contiguous metadata, and the right values.

A subclass names the backend. Each call also checks that every function of the backend receives
contiguous metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from nsa_core import (
    NSAttention,
    block_attention,
    block_attention_decode,
    nsa_attention,
    plan_block_attention,
    resolve,
)
from nsa_core.cache.state import CacheState
from nsa_core.contract import BlockTables, DecodeCall, SlotCall
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.call_wrapper import Where, wrapped_calls
from nsa_verify.problems.cases import config_of

CONFIG = config_of(2, 1, 8, 8, (8, 8, 16, 1, 4), dim=8, init_blocks=0, local_blocks=1)
LENGTHS = (3, 0, 21)  # of the packed documents
TOKENS = sum(LENGTHS)
JUNK = 3  # between the values

Layout = Callable[[torch.Tensor], torch.Tensor]


def column(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, JUNK)], -1)[..., 0]


def every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, JUNK)], 1).flatten(0, 1)[::2]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def offset(x: torch.Tensor) -> torch.Tensor:
    junk = x.new_full((3,), JUNK)
    return torch.cat([junk, x.flatten(), junk])[3:-3].view(x.shape)


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


LAYOUTS = (column, every_second, transposed, offset, expanded)


def pair(layout: Layout, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` contiguous and in ``layout``; all rows equal the first one if expanded."""
    x = expanded(x).contiguous() if layout is expanded else x
    assert torch.equal(layout(x), x)
    return x, layout(x)


def integers(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the integer tensors among ``tensors``."""
    return [
        x for x in tensors if isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64)
    ]


@contextlib.contextmanager
def contiguous_metadata() -> Iterator[set[tuple[str, str]]]:
    """Check the metadata of all calls of backends; yield the slots and directions that ran."""
    ran: set[tuple[str, str]] = set()

    def check(
        where: Where, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        call = options.get("call")
        if isinstance(call, (SlotCall, DecodeCall)):
            ran.add(where[1:])
            assert all(x.is_contiguous() for x in integers([*args, *vars(call).values()])), where
        return function(*args, **options)

    with wrapped_calls(check):
        yield ran


def bounds_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def assert_same_bits(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def assert_right(actual: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """Check float32 results against float64."""
    for x, y in zip(actual, truth, strict=True):
        assert (x.double() - y).abs().max() < 1e-5 * y.abs().max()


def plan_of(backend: str, packed: bool = True) -> Plan:
    return resolve(
        CONFIG, backends=backend, device="cpu", dtype="float32", varlen=packed, needs_grad=True,
        deterministic=True,
    )  # fmt: skip


def layer(backend: str) -> NSAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NSAttention(CONFIG, backends=backend)


def train_layer(backend: str, cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients of x and of the projection."""
    attn, (x,) = layer(backend), tensors((TOKENS, 8))
    x.requires_grad_()
    y = attn(x, cu_seqlens, plan=plan_of(backend))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, attn.qkv.weight])]


def documents_alone(lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return :func:`train_layer`, computed in float64 with a call for each document."""
    attn, x = layer("sdpa").double(), tensors((TOKENS, 8))[0].double()
    x.requires_grad_()
    y = torch.cat([attn(document[None])[0] for document in x.split(lengths) if len(document)])
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, attn.qkv.weight])]


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def random_blocks(n: int) -> torch.Tensor:
    """Return block indices [T, 1, n]; block 0 is among them, and some do not exist."""
    blocks = torch.randint(-1, 4, (TOKENS, 1, n), generator=torch.Generator().manual_seed(0))
    blocks[..., 0] = 0
    return blocks


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Return o [m, Hq, Dv] in float64; ``visible`` bool [m, G, N]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v, seen = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v, visible))
    scores = torch.einsum("mhd,nhd->mhn", q, k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("mhn,nhd->mhd", p, v)


def visible_keys(blocks: torch.Tensor, first: int, keys: int, size: int) -> torch.Tensor:
    """Return which keys the queries from position ``first`` on see, bool [m, G, keys]."""
    key = torch.arange(keys)
    query = first + torch.arange(len(blocks))
    chosen = (blocks[..., None] == key // size).any(-2)
    return chosen & (key <= query[:, None, None])


def decode_problem() -> dict[str, torch.Tensor]:
    """Return the arguments of a step of two sequences over pages of 16 rows."""
    q, k, v = tensors((2, 1, 2, 8), (6, 16, 1, 8), (6, 16, 1, 8))
    lengths = torch.tensor([40, 20], dtype=torch.int32)
    return {
        "q": q,
        "k": k,
        "v": v,
        "blocks": torch.tensor([[0, 2, -1], [1, 2, 0]])[:, None, None],
        "lengths": lengths,
        "starts": lengths - 1,
        "block_table": torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32),
    }


def decode_truth(x: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return o of :func:`decode_problem` in float64."""
    outputs = []
    for b, pages in enumerate(x["block_table"].long()):
        length, start = int(x["lengths"][b]), int(x["starts"][b])
        k, v = (x[name][pages].flatten(0, 1)[:length] for name in ("k", "v"))
        outputs.append(
            dense_attention(x["q"][b], k, v, visible_keys(x["blocks"][b], start, length, 16))
            * (start < length)
        )
    return torch.stack(outputs)


class StridedMetadata:
    """The tests.

    Attributes:
        backend: Name of the backend.
        decode_forms: The forms of its decode plans.
    """

    backend: str
    decode_forms: frozenset[str]

    def test_boundaries_of_a_layer_that_change_between_calls(self) -> None:
        table = torch.full((len(LENGTHS) + 1, 2), JUNK, dtype=torch.int32)
        bounds = table[:, 0]
        for lengths in (LENGTHS, (20, 4, 0)):
            table[:, 0] = bounds_of(lengths)
            with contiguous_metadata() as ran:
                actual = train_layer(self.backend, bounds)
            assert ("sel", "forward") in ran
            assert ran & {("sel", "backward"), ("core", "backward")}
            assert_right(actual, documents_alone(lengths))
        assert_same_bits(actual, train_layer(self.backend, bounds.contiguous()))

    def test_blocks_in_place_of_the_selection(self) -> None:
        *qkv, gates, do = tensors(*[(TOKENS, heads, 8) for heads in (2, 1, 1, 2, 2)])
        gates, plan = gates[..., :3].abs(), plan_of(self.backend)
        bounds, blocks = bounds_of(LENGTHS), random_blocks(2)

        def train(cu_seqlens: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
            leaves = [t.clone().requires_grad_() for t in (*qkv, gates)]
            o = nsa_attention(
                *leaves, cu_seqlens=cu_seqlens, blocks=blocks, plan=plan, nonnegative_gates=True
            )
            return [o.detach(), *torch.autograd.grad(o, leaves, do)]

        with contiguous_metadata():
            actual = train(column(bounds), column(blocks))
        assert_same_bits(actual, train(bounds, blocks))

    @pytest.mark.parametrize("layout", [column, transposed, expanded])
    def test_block_attention(self, layout: Layout) -> None:
        q, k, v, do = tensors(*[(TOKENS, heads, 8) for heads in (2, 1, 1, 2)])
        blocks, strided = pair(layout, random_blocks(2))
        bounds = bounds_of(LENGTHS)
        plan = plan_block_attention(
            2, 1, 8, block_size=16, n_blocks=2, device="cpu", dtype="float32", varlen=True,
            needs_grad=True, deterministic=True, backends=self.backend,
        )  # fmt: skip

        def train(cu_seqlens: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            o = block_attention(*leaves, blocks, block_size=16, cu_seqlens=cu_seqlens, plan=plan)
            return [o.detach(), *torch.autograd.grad(o, leaves, do)]

        with contiguous_metadata():
            actual = train(column(bounds), strided)
        assert_same_bits(actual, train(bounds, blocks))
        leaves = [t.double().requires_grad_() for t in (q, k, v)]
        documents = zip(*(x.split(LENGTHS) for x in (*leaves, blocks)))
        o = torch.cat(
            [dense_attention(*x, visible_keys(own, 0, len(own), 16)) for *x, own in documents]
        )
        assert_right(actual, [o, *torch.autograd.grad(o, leaves, do.double())])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_block_attention_decode(self, layout: Layout) -> None:
        x, options = decode_problem(), {"block_size": 16, "backends": self.backend}
        names = ("lengths", "starts", "block_table", "blocks")
        pairs = {name: pair(layout, x[name]) for name in names}
        x |= {name: contiguous for name, (contiguous, _) in pairs.items()}
        strided = {name: tensor for name, (_, tensor) in pairs.items()}
        with contiguous_metadata():
            o = block_attention_decode(**{**x, **strided}, **options)
        assert_same_bits([o], [block_attention_decode(**x, **options)])
        assert_right([o], [decode_truth(x)])

    def test_a_decode_call_whose_metadata_changes(self) -> None:
        """A plan's kernel reads the call anew, as replays of a CUDA graph do."""
        x = decode_problem()
        plan = plan_block_attention(
            2, 1, 8, block_size=16, n_blocks=3, phase="decode", page_size=16, device="cpu",
            dtype="float32", backends=self.backend,
        )  # fmt: skip
        metadata = {name: column(x[name]) for name in ("starts", "lengths", "block_table")}
        tables = BlockTables(*(metadata["block_table"],) * 4)
        positions = (metadata["starts"], metadata["lengths"])
        call = DecodeCall(plan.request.geometry, 8**-0.5, *positions, tables, max_len=48)
        for lengths, shift in (((40, 20), 0), ((20, 33), 1), ((48, 1), 2)):
            x["lengths"] = torch.tensor(lengths, dtype=torch.int32)
            x["starts"], x["block_table"] = x["lengths"] - 1, x["block_table"].roll(shift, 1)
            for key, tensor in metadata.items():
                tensor.copy_(x[key])
            o, _ = plan.kernel(x["q"], x["k"], x["v"], column(x["blocks"]), call=call)
            assert_right([o], [decode_truth(x)])

    def test_slots_of_a_plan_called_on_their_own(self) -> None:
        """The gradient of a slot takes the boundaries of its forward."""
        bounds, plan = bounds_of(LENGTHS), plan_of(self.backend)
        rows = CONFIG.geometry.max_compressed(TOKENS)
        shapes = [(n, heads, 8) for n, heads in ((TOKENS, 2), (TOKENS, 1), (rows, 1))]
        q, k, k_cmp, gates = tensors(*shapes, (TOKENS, 2, 3))

        def run(packing: dict[str, torch.Tensor], layout: Layout) -> list[torch.Tensor]:
            leaves = x, y, y_cmp = [t.clone().requires_grad_() for t in (q, k, k_cmp)]
            o_cmp, lse = plan.cmp(x, y_cmp, y_cmp, **packing)
            blocks = plan.select(x, y_cmp, lse, **packing)
            o_sel, _ = plan.sel(x, y, y, layout(blocks), **packing)
            o_win, _ = plan.win(x, y, y, **packing)
            o = plan.combine(gates, o_cmp, o_sel, o_win, **packing)
            gradients = torch.autograd.grad(o.square().sum(), leaves)
            return [o_cmp, blocks, o_sel, o_win, o, *gradients]

        strided = column(bounds_of((20, 4, 0)))
        plan.win(q, k, k, cu_seqlens=strided)
        strided.copy_(bounds)
        with contiguous_metadata() as ran:
            actual = run({"cu_seqlens": strided}, column)
        assert len(ran) == 9  # each slot in each direction; select has no backward
        assert_same_bits(actual, run({"cu_seqlens": bounds}, torch.clone))

    def test_steps_over_a_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All decode forms of a plan, fused ones too, and steps whose ``new`` is strided."""
        (x,), advance = tensors((2, 30, 8)), CacheState.advance

        def strided_call(*args: Any) -> DecodeCall:
            call = advance(*args)
            metadata = {"starts": column(call.starts), "lengths": column(call.lengths)}
            tables = BlockTables(*map(column, call.tables))
            return dataclasses.replace(call, tables=tables, **metadata)

        def steps(layout: Layout) -> list[torch.Tensor]:
            attn = layer(self.backend)
            cache = attn.new_cache(2, 48, page_size=16)
            cache.reserve(48)  # the last step cannot ask for pages
            attn.backends = "sdpa"  # of the prefill
            new = layout(torch.tensor([3, 1], dtype=torch.int32))
            attn(x[:, :20], cache=cache)
            outputs = [attn(x[:, 20:23], cache=cache, new=new), attn(x[:, 23:24], cache=cache)]
            with monkeypatch.context() as patch:  # as in a captured graph
                patch.setattr("nsa_core.cache.step.is_capturing", lambda _: True)
                outputs.append(attn(x[:, 24:27], cache=cache, new=new))
            assert cache.host_lengths() == [27, 23]
            return outputs

        expected = steps(torch.clone)
        with torch.no_grad():
            whole = layer("sdpa").double()(x[:1, :27].double())
        assert_right([torch.cat([y[:1] for y in expected], 1)], [whole[:, 20:]])
        monkeypatch.setattr(CacheState, "advance", strided_call)
        with contiguous_metadata() as ran:
            actual = steps(column)
        assert {slot for slot, direction in ran if direction == "decode"} >= self.decode_forms
        assert_same_bits(actual, expected)
