"""Backward of the selected branch in the interpreter, against the oracle in float64."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from nsa_backend_triton.host import configs
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
    heads: int = 3
    groups: int = 2
    Dk: int = 16
    Dv: int = 16
    scale: float = 0.3
    geometry: BlockGeometry = SMALL

    def inputs(self) -> tuple[dict[str, Tensor], SlotCall, Tensor]:
        """q, k, v, blocks by name; the call; dO. float64."""
        make = torch.Generator().manual_seed(0)
        total, n = sum(self.lengths), self.geometry.num_selected_blocks
        lead = (total,) if self.batch is None else (self.batch, total)
        shapes = {
            "q": (self.heads * self.groups, self.Dk),
            "k": (self.groups, self.Dk),
            "v": (self.groups, self.Dv),
        }
        inputs = {
            name: torch.randn((*lead, *s), generator=make).double() for name, s in shapes.items()
        }
        do = torch.randn((*lead, self.heads * self.groups, self.Dv), generator=make).double()
        most = self.geometry.num_select_blocks(max(self.lengths))
        blocks = torch.randint(-1, most + 2, (*lead, self.groups, n), generator=make).int()
        blocks[..., 0, :, :] = 0  # a block counts once
        blocks[..., 1, :, :] = -1  # a token without a key
        blocks[..., 2:, :, 1] = 0  # block 0 is in more than one chunk
        blocks[..., 3, :, 0] = 2**31 - 1
        cu = None
        if self.batch is None:
            cu = torch.tensor([0, *self.lengths]).cumsum(0).int()
        call = SlotCall(self.geometry, self.scale, cu, max(self.lengths))
        return {**inputs, "blocks": blocks}, call, do

    def truth(self, inputs: dict[str, Tensor], call: SlotCall, do: Tensor) -> oracle.Truth:
        """The oracle's answer."""
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
    "two-parts": Problem((70,), groups=1, geometry=BlockGeometry(8, 4, 32, 2, 1, 1, 5)),
    "odd-block": Problem((50,), groups=1, geometry=BlockGeometry(8, 4, 24, 3, 1, 1, 5)),
    "zero-scale": Problem((21,), groups=1, scale=0.0),
    "negative-scale": Problem((21,), groups=1, scale=-0.3),
    "documents": Problem((0, 18, 1, 0, 5), batch=None, heads=2, groups=1),
    "packed": Problem(PACKED, batch=None),
    "packed-odd-block": Problem(
        (26, 37), batch=None, groups=1, geometry=BlockGeometry(8, 4, 24, 3, 1, 1, 5)
    ),
}


QUICK = {"four-tokens", "narrow-v", "wide-v", "h7", "documents"}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROBLEMS]


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 2.4 no longer takes an array of one element for an integer, which triton 3.6 makes of a
    loop's bound.
    """
    stock = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def gradients(
    inputs: dict[str, Tensor], call: SlotCall, do: Tensor, truth: oracle.Truth, **change: Any
) -> list[Tensor]:
    """dq, dk, dv of the backend, o and lse being the oracle's."""
    from nsa_backend_triton.sel.backward import backward

    assert truth.lse is not None
    call = dataclasses.replace(call, **change)
    o, lse = (x.to(inputs["q"].dtype) for x in (truth.o, truth.lse))
    return list(backward(do, *inputs.values(), o, lse, call=call))


@pytest.mark.parametrize("deterministic", [False, True], ids=["added", "ordered"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_the_oracle(name: str, deterministic: bool) -> None:
    problem = PROBLEMS[name]
    inputs, call, do = problem.inputs()
    truth = problem.truth(inputs, call, do)
    found = gradients(inputs, call, do, truth, deterministic=deterministic)
    for x, (key, expected) in zip(found, truth.grads.items(), strict=True):
        torch.testing.assert_close(
            x, expected, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
        )


FORMS = {"turned": ({"TURN": 1}, {}), "turned, described": ({"TURN": 1}, {"TMA": 1})}
FORMED = [
    ("turned", "h7"),
    ("turned, described", "h20"),
    ("turned, described", "documents"),
    *(
        pytest.param("turned, described", name, marks=pytest.mark.slow)
        for name in ("wide", *PROBLEMS)
    ),
]
# descriptors fit, rows fill a tile, tokens behind the first SIZE
WIDE = Problem((36,), batch=2, heads=2, groups=2)


@pytest.mark.parametrize("deterministic", [False, True], ids=["added", "ordered"])
@pytest.mark.parametrize(("form", "name"), FORMED)
def test_every_form_equals_the_oracle(
    form: str, name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEMS.get(name, WIDE)
    rows = dict(configs.table(0))
    for kernel, settings in zip(("sel_block_backward", "sel_tile_backward"), FORMS[form]):
        rows[kernel] = [({}, {**rows[kernel][0][1], **settings})]
    monkeypatch.setattr(configs, "table", lambda _: rows)
    inputs, call, do = problem.inputs()
    truth = problem.truth(inputs, call, do)
    found = gradients(inputs, call, do, truth, deterministic=deterministic)
    for x, (key, expected) in zip(found, truth.grads.items(), strict=True):
        torch.testing.assert_close(
            x, expected, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_the_table_can_ask_for_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """ORDERED: the default mode has the bits of ``deterministic``, which are not those of the other
    form.
    """
    problem = PROBLEMS["h7"]
    inputs, call, do = problem.inputs()
    truth = problem.truth(inputs, call, do)
    added = gradients(inputs, call, do, truth)
    fixed = gradients(inputs, call, do, truth, deterministic=True)
    rows = dict(configs.table(0))
    rows["sel_block_backward"] = [({}, {**rows["sel_block_backward"][0][1], "ORDERED": 1})]
    monkeypatch.setattr(configs, "table", lambda _: rows)
    asked = gradients(inputs, call, do, truth)
    assert not all(torch.equal(x, y) for x, y in zip(added, fixed))
    assert all(torch.equal(x, y) for x, y in zip(asked, fixed))


def test_few_tokens_make_as_many_programs_as_there_are_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Segments and chunks get shorter with the sequence, to their least, and depend on nothing but
    the shape.
    """
    from nsa_backend_triton.host import sequences
    from nsa_backend_triton.host.sequences import Sequences
    from nsa_backend_triton.sel import backward as sel_backward

    monkeypatch.setattr(sequences, "multiprocessors", lambda device: 132)
    settings = {"SEGMENT": 32768, "CHUNK": 2048, "PROGRAMS": 8}

    def shares(length: int, *, ordered: bool = False, packed: bool = False) -> tuple[int, ...]:
        q, k = (
            torch.empty(1, heads, 1, device="meta").expand(length, heads, 1) for heads in (12, 2)
        )
        call = SlotCall(BlockGeometry(), 1.0, None, length // 4 if packed else length)
        seqs = Sequences(q, q, 4 if packed else 1, length, packed)
        problem = sel_backward.Problem(q, q, k, k, q, q, seqs, call)
        return tuple(
            sel_backward._shares(problem, length * 2 * 16, 2 * length // 64, settings, ordered)
        )

    assert shares(2048) == (64 * 16, 128, 16, 256)  # the least of both
    assert shares(16384) == (512 * 32, 512, 32, 256)  # the most segments
    assert shares(16384, packed=True) == (512 * 9, 496, 9, 256)
    assert shares(65536, ordered=True) == (65536 * 32 // 1024 + 2048, 2048, 32, 1024)
    assert shares(2**20, ordered=True)[3] == 2048  # the most pairs
    settings["SEGMENT"] = 12288
    assert shares(65536, packed=True)[1] == 1985
    assert shares(2**18, packed=True)[1:3] == (2048, 32)


@pytest.mark.parametrize("deterministic", [False, True], ids=["added", "ordered"])
def test_wide_offsets_equal_the_oracle(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa_backend_triton.sel import backward as sel_backward

    monkeypatch.setattr(sel_backward, "_wide", lambda _: True)
    test_gradients_equal_the_oracle("documents", deterministic)


@pytest.mark.parametrize("name", ["q", "do"])
def test_offsets_past_32_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens so far apart that the last begins at 2^31: in a file without contents but for the
    rows.
    """
    # copies memory onto itself
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    problem = Problem((4,))
    inputs, call, do = problem.inputs()
    truth = problem.truth(inputs, call, do)
    near = {**inputs, "do": do}[name]
    steps = list(near.stride())
    steps[1] = -(-(2**31) // (near.shape[1] - 1))
    size = sum((n - 1) * step for n, step in zip(near.shape, steps)) + 1
    store = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=near.dtype)
    far = {name: store.as_strided(near.shape, steps).copy_(near)}
    with strict():  # which sees an int32 that overflows
        found = gradients(
            {key: far.get(key, x) for key, x in inputs.items()}, call, far.get("do", do), truth
        )
    for x, (key, expected) in zip(found, truth.grads.items(), strict=True):
        torch.testing.assert_close(
            x, expected, rtol=1e-10, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize(("step", "refused"), [(2**31 // 3, False), (2**31 // 3 + 1, True)])
def test_heads_further_apart_than_32_bits_are_refused(step: int, refused: bool) -> None:
    from nsa_backend_triton.host import sequences

    x = torch.empty_strided((1, 5, 4, 8), (1, 8, step, 1), device="meta")
    with pytest.raises(ValueError, match="contiguous") if refused else contextlib.nullcontext():
        assert sequences.strides(x, packed=False) == (0, 8, step)


@pytest.mark.parametrize(
    ("tokens", "step", "refused"),
    [
        (300, 2**31 // 255, False),
        (300, 2**31 // 255 + 1, True),
        (2, 2**31 - 1, False),
        (2, 2**31, True),
        (1, 2**31, False),
    ],
)
def test_tokens_of_a_tile_further_apart_than_32_bits_are_refused(
    tokens: int, step: int, refused: bool
) -> None:
    from nsa_backend_triton.host import sequences

    x = torch.empty_strided((1, tokens, 4, 8), (1, step, 8, 1), device="meta")
    assert sequences.strides(x, packed=False, far=True) == (0, step, 8)
    with (
        pytest.raises(ValueError, match="neighbouring tokens")
        if refused
        else contextlib.nullcontext()
    ):
        assert sequences.strides(x, packed=False) == (0, step, 8)


NEAR = (12, 1)
# tokens, (token, head) strides of q [1, S, 4, 12] and do [1, S, 4, 14], two heads a group
EDGES = [
    (3, (2**30 - 7, 2), NEAR, True),  # its last number is the 2^31st
    (3, (2**30 - 7, 1), NEAR, False),
    (3, NEAR, (2**30 - 8, 2), True),
    (3, NEAR, (2**30 - 8, 1), False),
    (2**31 // 48 + 1, NEAR, NEAR, True),  # dq's sums are contiguous
    (2**31 // 48, NEAR, NEAR, False),
]


@pytest.mark.parametrize(("tokens", "of_q", "of_do", "wide"), EDGES)
def test_offsets_are_wide_where_32_bits_end(
    tokens: int, of_q: tuple[int, int], of_do: tuple[int, int], wide: bool
) -> None:
    from nsa_backend_triton.host import sequences
    from nsa_backend_triton.sel import backward as sel_backward

    def make(heads: int, width: int, steps: tuple[int, int]) -> Tensor:
        return torch.empty_strided((1, tokens, heads, width), (0, *steps, 1), device="meta")

    q, do, k, v = make(4, 12, of_q), make(4, 14, of_do), make(2, 12, NEAR), make(2, 14, NEAR)
    seqs = sequences.Sequences(q, q, 1, tokens, False)
    call = SlotCall(BlockGeometry(), 1.0, None, tokens)
    assert sel_backward._wide(sel_backward.Problem(do, q, k, v, q, q, seqs, call)) == wide
