"""Backward of sel in the interpreter, against the oracle in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from nsa_backend_triton.host import configs
from nsa_backend_triton.sel import delta
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle

SMALL = BlockGeometry(8, 4, 16, 4, 1, 2, 5)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes and options; ``lengths`` of the documents, or one length for a batch."""

    lengths: tuple[int, ...] = (41,)
    batch: int | None = 1  # None: packed
    heads: int = 3  # per kv head
    groups: int = 2  # kv heads
    Dk: int = 16
    Dv: int = 16
    scale: float = 0.3
    geometry: BlockGeometry = SMALL

    def inputs(self) -> tuple[dict[str, Tensor], SlotCall, Tensor]:
        """Return q, k, v and blocks by name, the call, and do, in float64."""
        generator = torch.Generator().manual_seed(0)
        total, n = sum(self.lengths), self.geometry.num_selected_blocks
        lead = (total,) if self.batch is None else (self.batch, total)
        shapes = {
            "q": (self.heads * self.groups, self.Dk),
            "k": (self.groups, self.Dk),
            "v": (self.groups, self.Dv),
        }
        inputs = {
            name: torch.randn((*lead, *shape), generator=generator).double()
            for name, shape in shapes.items()
        }
        do = torch.randn((*lead, self.heads * self.groups, self.Dv), generator=generator).double()
        num_blocks = self.geometry.num_select_blocks(max(self.lengths))
        shape = (*lead, self.groups, n)
        blocks = torch.randint(-1, num_blocks + 2, shape, generator=generator).int()
        blocks[..., 0, :, :] = 0  # a repeated block counts once
        blocks[..., 1, :, :] = -1  # a token without keys
        blocks[..., 2:, :, 1] = 0  # block 0 has more than one chunk
        blocks[..., 3, :, 0] = 2**31 - 1
        cu = None
        if self.batch is None:
            cu = torch.tensor([0, *self.lengths]).cumsum(0).int()
        call = SlotCall(self.geometry, self.scale, cu, max(self.lengths))
        return {**inputs, "blocks": blocks}, call, do

    def truth(self, inputs: dict[str, Tensor], call: SlotCall, do: Tensor) -> oracle.Truth:
        """Return the oracle's result."""
        cu = call.cu_seqlens
        return oracle.sel(**inputs, geometry=self.geometry, scale=self.scale, cu_seqlens=cu, do=do)


PACKED = (0, 27, 1, 0, 16, 5, 0)
PROBLEMS = {
    "batch": Problem((35,), batch=2),
    "h1": Problem(heads=1),
    "h7": Problem((27,), heads=7, groups=1),
    "h20": Problem((19,), heads=20, groups=1),
    "four-tokens": Problem((4,), batch=2, heads=1, groups=1),
    "narrow-v": Problem((21,), Dk=24, Dv=16, groups=1),
    "wide-v": Problem((21,), Dk=5, Dv=19, groups=1),
    "three-segments": Problem(
        (140,), heads=1, groups=1, geometry=BlockGeometry(8, 4, 16, 2, 1, 1, 5)
    ),
    "two-key-tiles": Problem((70,), groups=1, geometry=BlockGeometry(8, 4, 32, 2, 1, 1, 5)),
    "block-of-256": Problem(
        (261,), heads=1, groups=1, geometry=BlockGeometry(8, 4, 256, 2, 1, 1, 5)
    ),
    "odd-block": Problem((50,), groups=1, geometry=BlockGeometry(8, 4, 24, 3, 1, 1, 5)),
    "many-blocks": Problem(
        (20,), heads=1, groups=1, geometry=BlockGeometry(8, 4, 16, 130, 1, 1, 5)
    ),
    "zero-scale": Problem((21,), groups=1, scale=0.0),
    "negative-scale": Problem((21,), groups=1, scale=-0.3),
    "documents": Problem((0, 18, 1, 0, 5), batch=None, heads=2, groups=1),
    "packed": Problem(PACKED, batch=None),
    "packed-odd-block": Problem(
        (26, 37), batch=None, groups=1, geometry=BlockGeometry(8, 4, 24, 3, 1, 1, 5)
    ),
}


QUICK = {"four-tokens", "narrow-v", "wide-v", "h7", "documents", "many-blocks"}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROBLEMS]


def gradients(
    inputs: dict[str, Tensor], call: SlotCall, do: Tensor, truth: oracle.Truth, **change: Any
) -> list[Tensor]:
    """Return dq, dk and dv of the backend, for the oracle's o and lse."""
    from nsa_backend_triton.sel.backward import backward

    assert truth.lse is not None
    call = dataclasses.replace(call, **change)
    o, lse = (x.to(inputs["q"].dtype) for x in (truth.o, truth.lse))
    return list(backward(do, *inputs.values(), o, lse, call=call))


def assert_gradients_equal_the_oracle(
    problem: Problem, deterministic: bool = False, **changes: Any
) -> list[Tensor]:
    """Check and return dq, dk and dv; ``changes`` replace inputs."""
    inputs, call, do = problem.inputs()
    inputs |= changes
    truth = problem.truth(inputs, call, do)
    grads = gradients(inputs, call, do, truth, deterministic=deterministic)
    for x, (key, expected) in zip(grads, truth.grads.items(), strict=True):
        torch.testing.assert_close(
            x, expected, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
        )
    return grads


@pytest.mark.few_cases(
    "h7-unordered",
    "four-tokens-unordered",
    "four-tokens-ordered",
    "narrow-v-unordered",
    "narrow-v-ordered",
    "wide-v-unordered",
    "wide-v-ordered",
    "many-blocks-unordered",
    "documents-unordered",
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_the_oracle(name: str, deterministic: bool) -> None:
    assert_gradients_equal_the_oracle(PROBLEMS[name], deterministic=deterministic)


# Settings of sel_block_backward and of sel_tile_backward.
FORMS = {
    "query-major": ({"QUERY_MAJOR": 1}, {}),
    "query-major, TMA": ({"QUERY_MAJOR": 1}, {"USE_TMA": 1}),
    "wide tiles": ({"BLOCK_M": 32, "BLOCK_N": 64}, {"BLOCK_M": 32, "BLOCK_N": 64}),
}
FORM_CASES = [
    ("query-major", "h7"),
    ("query-major, TMA", "h20"),
    ("query-major, TMA", "documents"),
    ("wide tiles", "block-of-256"),
    *(
        pytest.param("query-major, TMA", name, marks=pytest.mark.slow)
        for name in ("full-tiles", *PROBLEMS)
    ),
]
# Descriptors fit, rows fill a tile, and blocks have pairs that need no mask.
FULL_TILES = Problem((36,), batch=2, heads=2, groups=2)


@pytest.mark.few_cases(
    "query-major-h7-unordered",
    "query-major, TMA-h20_0-unordered",
    "query-major, TMA-documents0-unordered",
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize(("form", "name"), FORM_CASES)
def test_every_form_equals_the_oracle(
    form: str, name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict(configs.table(0))
    for kernel, settings in zip(("sel_block_backward", "sel_tile_backward"), FORMS[form]):
        rows[kernel] = [({}, {**rows[kernel][0][1], **settings})]
    monkeypatch.setattr(configs, "table", lambda _: rows)
    problem = PROBLEMS.get(name, FULL_TILES)
    assert_gradients_equal_the_oracle(problem, deterministic=deterministic)


def test_base_2_moves_no_lse_in_one_direction() -> None:
    """Else all probabilities of long rows are too large or too small by more than a rounding."""
    lse = torch.rand(1, 2, 4096) * 6 + 6
    do, o = torch.randn(2, 1, 4096, 2, 4)
    _, lse2 = delta.rows(do, o, lse, packed=False)
    expected = lse.double().transpose(1, 2) / math.log(2)
    error = (lse2 - expected) / (expected * 2**-24)
    assert error.abs().max() <= 1
    assert abs(error.mean()) < 0.03  # 0.22 with log2(e) rounded to float32


@pytest.mark.slow
def test_setting_ordered_gives_the_bits_of_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``deterministic``, ORDERED gives its bits; the unordered form gives others."""
    problem = PROBLEMS["h7"]
    inputs, call, do = problem.inputs()
    truth = problem.truth(inputs, call, do)
    unordered = gradients(inputs, call, do, truth)
    deterministic = gradients(inputs, call, do, truth, deterministic=True)
    rows = dict(configs.table(0))
    rows["sel_block_backward"] = [({}, {**rows["sel_block_backward"][0][1], "ORDERED": 1})]
    monkeypatch.setattr(configs, "table", lambda _: rows)
    ordered = gradients(inputs, call, do, truth)
    assert not all(torch.equal(x, y) for x, y in zip(unordered, deterministic))
    assert all(torch.equal(x, y) for x, y in zip(ordered, deterministic))


def test_short_sequences_get_shorter_segments_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every multiprocessor gets programs, down to a minimum of work; only the shape counts."""
    from nsa_backend_triton.host import device
    from nsa_backend_triton.host.sequences import Sequences
    from nsa_backend_triton.sel import backward as sel_backward

    monkeypatch.setattr(device, "multiprocessors", lambda _: 132)
    settings = {"SEGMENT_ROWS": 32768, "CHUNK_PAIRS": 2048, "PROGRAMS_PER_SM": 8}

    def schedule(
        length: int, *, ordered: bool = False, packed: bool = False, n: int = 1, apart: bool = False
    ) -> tuple[int, ...]:
        q, k = (
            torch.empty(1, heads, 1, device="meta").expand(length, heads, 1) for heads in (12, 2)
        )
        call = SlotCall(BlockGeometry(), 1.0, None, length // 4 if packed else length)
        seqs = Sequences(q, q, 4 if packed else n, length, packed, apart=apart)
        problem = sel_backward.Problem(q, q, k, k, q, q, seqs, call)
        pairs, buckets = n * length * 2 * 16, n * 2 * length // 64
        return tuple(sel_backward._schedule(problem, pairs, buckets, settings, ordered))

    assert schedule(2048) == (64 * 16, 128, 16, 256)  # the minimum of both
    assert schedule(16384) == (512 * 32, 512, 32, 256)  # the maximum of segments
    assert schedule(16384, packed=True) == (512 * 9, 496, 9, 256)
    assert schedule(65536, ordered=True) == (65536 * 32 // 1024 + 2048, 2048, 32, 1024)
    assert schedule(2**20, ordered=True)[3] == 2048  # the maximum of pairs
    assert schedule(16384, ordered=True, n=4)[3] == 1024
    assert schedule(16384, ordered=True, n=4, apart=True)[3] == 256  # as for one of them
    settings["SEGMENT_ROWS"] = 12288
    assert schedule(65536, packed=True)[1] == 1985
    assert schedule(2**18, packed=True)[1:3] == (2048, 32)


@pytest.mark.few_cases("unordered")
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
def test_gradients_with_int64_offsets_equal_the_oracle(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_backend_triton.sel import backward as sel_backward

    monkeypatch.setattr(sel_backward, "_needs_int64_offsets", lambda _: True)
    test_gradients_equal_the_oracle("documents", deterministic)


@pytest.mark.parametrize("name", ["q", "do"])
def test_inputs_with_offsets_beyond_32_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stride between tokens puts the last one at 2^31, in a sparse file."""
    # This step of the interpreter copies all of the memory onto itself.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    problem = Problem((4,))
    inputs, call, do = problem.inputs()
    truth = problem.truth(inputs, call, do)
    contiguous = {**inputs, "do": do}[name]
    strides = list(contiguous.stride())
    strides[1] = -(-(2**31) // (contiguous.shape[1] - 1))
    size = sum((n - 1) * stride for n, stride in zip(contiguous.shape, strides)) + 1
    store = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=contiguous.dtype)
    far = {name: store.as_strided(contiguous.shape, strides).copy_(contiguous)}
    with strict():  # reports int32 overflow
        grads = gradients(
            {key: far.get(key, x) for key, x in inputs.items()}, call, far.get("do", do), truth
        )
    for x, (key, expected) in zip(grads, truth.grads.items(), strict=True):
        torch.testing.assert_close(
            x, expected, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize(("stride", "refused"), [(2**31 // 3, False), (2**31 // 3 + 1, True)])
def test_head_offsets_beyond_32_bits_are_refused(stride: int, refused: bool) -> None:
    from nsa_backend_triton.host import strides

    x = torch.empty_strided((1, 5, 4, 8), (1, 8, stride, 1), device="meta")
    with pytest.raises(ValueError, match="contiguous") if refused else contextlib.nullcontext():
        assert strides.strides(x, packed=False) == (0, 8, stride)


@pytest.mark.parametrize(
    ("tokens", "stride", "refused"),
    [
        (300, 2**31 // 255, False),
        (300, 2**31 // 255 + 1, True),
        (2, 2**31 - 1, False),
        (2, 2**31, True),
        (1, 2**31, False),
    ],
)
def test_token_offsets_of_a_tile_beyond_32_bits_are_refused(
    tokens: int, stride: int, refused: bool
) -> None:
    from nsa_backend_triton.host import strides

    x = torch.empty_strided((1, tokens, 4, 8), (1, stride, 8, 1), device="meta")
    assert strides.strides(x, packed=False, int64_products=True) == (0, stride, 8)
    with (
        pytest.raises(ValueError, match="neighbouring tokens")
        if refused
        else contextlib.nullcontext()
    ):
        assert strides.strides(x, packed=False) == (0, stride, 8)


NEAR = (12, 1)
# Tokens, (token, head) strides of q [1, S, 4, 12] and of do [1, S, 4, 14], 2 heads per group.
EDGES = [
    (3, (2**30 - 7, 2), NEAR, True),  # the last element is the 2^31st
    (3, (2**30 - 7, 1), NEAR, False),
    (3, NEAR, (2**30 - 8, 2), True),
    (3, NEAR, (2**30 - 8, 1), False),
    (2**31 // 48 + 1, NEAR, NEAR, True),  # dq's sums are contiguous
    (2**31 // 48, NEAR, NEAR, False),
]


@pytest.mark.parametrize(("tokens", "q_strides", "do_strides", "int64"), EDGES)
def test_offsets_are_int64_exactly_where_32_bits_end(
    tokens: int, q_strides: tuple[int, int], do_strides: tuple[int, int], int64: bool
) -> None:
    from nsa_backend_triton.host import sequences
    from nsa_backend_triton.sel import backward as sel_backward

    def new(heads: int, width: int, strides: tuple[int, int]) -> Tensor:
        return torch.empty_strided((1, tokens, heads, width), (0, *strides, 1), device="meta")

    q, do, k, v = new(4, 12, q_strides), new(4, 14, do_strides), new(2, 12, NEAR), new(2, 14, NEAR)
    seqs = sequences.Sequences(q, q, 1, tokens, False)
    call = SlotCall(BlockGeometry(), 1.0, None, tokens)
    problem = sel_backward.Problem(do, q, k, v, q, q, seqs, call)
    assert sel_backward._needs_int64_offsets(problem) == int64
