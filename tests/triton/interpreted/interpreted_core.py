"""The backward of the whole core against the backwards of its slots."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mutation_cases import DESCRIBED, _rows
from nsa_backend_triton.combine import kernels as combine
from nsa_backend_triton.core import backward as core
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch
from nsa_backend_triton.sel import bitmask
from nsa_backend_triton.sel import slot as sel
from nsa_backend_triton.select import forward as select
from nsa_backend_triton.span import cmp, win
from nsa_core.contract import BRANCHES, SlotCall
from nsa_core.dryrun import PeakBytes, rounded
from nsa_core.layout import BlockGeometry

GEOMETRY = BlockGeometry(8, 4, 16, 2, 0, 1, 18)
DOCUMENTS = (0, 5, 36, 1, 9)


def tensors(
    call: SlotCall, total: int, batch: int, heads: tuple[int, int], widths: tuple[int, int]
) -> dict[str, Tensor]:
    """Return the inputs and the results of the forward in float64."""
    generator = torch.Generator().manual_seed(3)
    packed = call.cu_seqlens is not None
    lead = () if packed else (batch,)
    num_compressed = call.geometry.max_compressed if packed else call.geometry.num_compressed

    def rand(rows: int, num_heads: int, width: int) -> Tensor:
        shape = (*lead, rows, num_heads, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    (hq, g), (dk, dv), n_c = heads, widths, num_compressed(total)
    x = {"do": rand(total, hq, dv), "q": rand(total, hq, dk)}
    for name, rows in (("cmp", n_c), ("sel", total), ("win", total)):
        x |= {f"k_{name}": rand(rows, g, dk), f"v_{name}": rand(rows, g, dv)}
    x["gates"] = rand(total, hq, 3).abs()
    x["gates"][..., 0, 1] = 0.0
    q = x["q"]
    o_cmp, lse_cmp = cmp.forward(q, x["k_cmp"], x["v_cmp"], call=call)
    x["blocks"] = select.forward(q, x["k_cmp"], lse_cmp, call=call)
    o_sel, lse_sel = sel.forward(q, x["k_sel"], x["v_sel"], x["blocks"], call=call)
    o_win, lse_win = win.forward(q, x["k_win"], x["v_win"], call=call)
    x |= {"o_cmp": o_cmp, "lse_cmp": lse_cmp, "o_sel": o_sel, "lse_sel": lse_sel}
    return x | {"o_win": o_win, "lse_win": lse_win}


def by_core(x: dict[str, Tensor], call: SlotCall, **options: object) -> dict[str, Tensor]:
    """Return the gradients as the backward of the core computes them."""
    outputs = [x[f"o_{branch}"] for branch in BRANCHES]
    tensors = [tensor for name, tensor in x.items() if not name.startswith("o_")]
    gradients = core.backward(*tensors, outputs=outputs, call=call, **options)._asdict()
    assert outputs == []
    return gradients


def by_slots(x: dict[str, Tensor], call: SlotCall) -> dict[str, Tensor]:
    """Return the gradients as the backwards of the slots compute them."""
    outputs = (x["o_cmp"], x["o_sel"], x["o_win"])
    dgates, do_cmp, do_sel, do_win = combine.backward(x["do"], x["gates"], *outputs, call=call)
    q, grads = x["q"], {"dgates": dgates}
    dq_cmp, grads["dk_cmp"], grads["dv_cmp"] = cmp.backward(
        do_cmp, q, x["k_cmp"], x["v_cmp"], x["o_cmp"], x["lse_cmp"], call=call
    )
    dq_sel, grads["dk_sel"], grads["dv_sel"] = sel.backward(
        do_sel, q, x["k_sel"], x["v_sel"], x["blocks"], x["o_sel"], x["lse_sel"], call=call
    )
    dq_win, grads["dk_win"], grads["dv_win"] = win.backward(
        do_win, q, x["k_win"], x["v_win"], x["o_win"], x["lse_win"], call=call
    )
    return grads | {"dq": dq_cmp + dq_sel + dq_win}


@pytest.mark.few_cases("lengths4-1-heads4-widths4-False")
@pytest.mark.parametrize(
    ("lengths", "batch", "heads", "widths", "ordered"),
    [
        pytest.param((43,), 2, (6, 2), (16, 24), False, marks=pytest.mark.slow),
        pytest.param((43,), 2, (6, 2), (16, 24), True, marks=pytest.mark.slow),
        pytest.param((43,), 1, (16, 1), (16, 16), False, marks=pytest.mark.slow),
        pytest.param((43,), 1, (16, 1), (16, 16), True, marks=pytest.mark.slow),
        ((7,), 1, (2, 2), (16, 8), False),
        ((7,), 1, (2, 2), (16, 8), True),
        (DOCUMENTS, 1, (3, 1), (24, 16), False),
        (DOCUMENTS, 1, (3, 1), (24, 16), True),
    ],
)
def test_gradients_equal_those_of_the_slots(
    lengths: tuple[int, ...],
    batch: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    ordered: bool,
) -> None:
    bounds = [0, *itertools.accumulate(lengths)]
    cu = torch.tensor(bounds, dtype=torch.int32) if len(lengths) > 1 else None
    call = SlotCall(GEOMETRY, 0.3, cu, max(lengths), deterministic=ordered)
    x = tensors(call, sum(lengths), batch, heads, widths)
    expected = by_slots(x, call)
    gradients = by_core(x, call)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient,
            expected[name],
            rtol=1e-12,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("sel", ["bits", "tiles", "sums"])  # the forms of sel's dq
@pytest.mark.parametrize("lengths", [(21,), DOCUMENTS])
def test_cmp_may_be_of_another_backend(
    lengths: tuple[int, ...], sel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward gets the do of the gated sum, and the gate by its LSE: +inf for a gate of 0."""
    monkeypatch.setattr(bitmask, "fits", lambda *problem: sel == "bits")
    bounds = [0, *itertools.accumulate(lengths)]
    cu = torch.tensor(bounds, dtype=torch.int32) if len(lengths) > 1 else None
    call = SlotCall(GEOMETRY, 0.3, cu, max(lengths), deterministic=sel == "tiles")
    x = tensors(call, sum(lengths), 1, (4, 2), (16, 24))
    x["gates"][..., ::3, :, 0] = 0.0
    expected, infinite = by_core(x, call), []

    def cmp_backward(do: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        assert do is x["do"]
        infinite.append(others[-1].isposinf())
        return cmp.backward(do, *others, call=call)

    for name, gradient in by_core(x, call, cmp_backward=cmp_backward).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12, msg=name)
    blank = x["lse_cmp"].isneginf() | (x["gates"][..., 0] == 0).transpose(-1, -2)
    assert torch.equal(infinite.pop(), blank)


class CheckedFork:
    """A fork whose blocks run at once.

    It checks that the blocks allocate nothing, and that the tensors of their kernels live until the
    fork ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.active, self.blocks, self.ended = True, 0, False
        self._count: PeakBytes | None = None  # in a block: the bytes that it allocates
        self._kept: list[object] = []
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        forks.append(self)

    def __enter__(self) -> CheckedFork:
        return self

    def __exit__(self, *error: object) -> None:
        assert all(storage() is not None for storage in self._storages)
        self._kept.clear()
        self.ended = True

    @contextlib.contextmanager
    def beside(self, *tensors: object) -> Iterator[None]:
        assert not self.ended
        self.blocks += 1
        self._kept += tensors
        with PeakBytes() as self._count:
            yield
            assert self._count.peak == 0
        self._count = None

    def launch(self, run: Callable[..., None], launch: Launch, *arguments: object) -> None:
        """Launch a kernel; remember its tensors if it runs in a block."""
        assert self._count is None or self._count.peak == 0
        run(launch, *arguments)
        if self._count is not None:
            self._count.peak = 0  # Triton's interpreter allocates memory
            tensors = [getattr(x, "base", x) for x in arguments if x is not None]
            self._storages += [weakref.ref(x.untyped_storage()) for x in tensors]


forks: list[CheckedFork] = []


@pytest.mark.few_cases("lengths0-bits")
@pytest.mark.parametrize("bits", [False, True], ids=["lists", "bits"])
@pytest.mark.parametrize("lengths", [(7,), DOCUMENTS])
def test_a_forked_backward_gives_the_same_bits(
    lengths: tuple[int, ...], bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dk and dv of cmp, win and the bit form of sel run in blocks of the fork, which is ended."""
    monkeypatch.setattr(bitmask, "fits", lambda *problem: bits)
    bounds = [0, *itertools.accumulate(lengths)]
    cu = torch.tensor(bounds, dtype=torch.int32) if len(lengths) > 1 else None
    call = SlotCall(GEOMETRY, 0.3, cu, max(lengths), deterministic=True)
    x = tensors(call, sum(lengths), 1, (2, 1), (16, 8))
    expected = by_core(dict(x), call)
    run = Launch.__call__
    forks.clear()
    monkeypatch.setattr(core, "Fork", CheckedFork)
    monkeypatch.setattr(
        Launch, "__call__", lambda *args: forks[-1].launch(run, *args) if forks else run(*args)
    )
    gradients = by_core(x, call)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    (fork,) = forks
    assert fork.ended
    assert fork.blocks == 2 + bits


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [21, 24])
def test_descriptors_read_no_padding_of_the_statistics(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of statistics are padded to 16 bytes; the padding is never written."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(configs, "table", lambda _: _rows(DESCRIBED))
    call = SlotCall(GEOMETRY, 0.3, None, tokens, deterministic=True)
    x = {
        name: value.float() if value.dtype == torch.float64 else value
        for name, value in tensors(call, tokens, 2, (4, 2), (16, 16)).items()
    }
    expected = by_slots(x, call)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        gradients = by_core(x, call)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gate", [1e-6, 1e5])
def test_small_and_large_gates_in_fp16(gate: float) -> None:
    call = SlotCall(GEOMETRY, 0.3, None, 43, deterministic=True)
    x = tensors(call, 43, 1, (4, 2), (16, 16))
    x["gates"].fill_(gate)
    x["do"] /= gate
    expected = by_core(x, call)
    halved = {k: v.half() if v.dtype == torch.float64 else v for k, v in x.items()}
    halved |= {k: v.float() for k, v in x.items() if k == "gates" or k.startswith("lse")}
    if not halved["do"].isfinite().all():
        halved["do"] = x["do"].clamp(-6e4, 6e4).half()
        expected = by_core({**x, "do": halved["do"].double()}, call)
    for name, gradient in by_core(halved, call).items():
        if name != "dgates":
            error = (gradient.double() - expected[name]).norm() / expected[name].norm()
            assert error < 5e-3, (name, error)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(96,), (40, 56)])
def test_the_outputs_of_the_branches_are_freed_before_the_peak(lengths: tuple[int, ...]) -> None:
    """Three tensors of q's size less at the peak than with outputs that live until the end."""
    cu = None
    if len(lengths) > 1:
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    call = SlotCall(GEOMETRY, 0.3, cu, max(lengths), deterministic=True)
    x = tensors(call, sum(lengths), 1, (4, 1), (16, 16))
    names = [f"o_{branch}" for branch in BRANCHES]
    others = [tensor for name, tensor in x.items() if name not in names]
    existing = [*x.values()] + ([] if cu is None else [cu])
    peaks = []
    for alive in (False, True):
        with PeakBytes(*existing) as counter:
            outputs = [x[name].clone() for name in names]
            kept = list(outputs) if alive else []
            gradients = core.backward(*others, outputs=outputs, call=call)
        peaks.append(counter.peak)
        del outputs, kept, gradients
    assert peaks[1] - peaks[0] == 3 * rounded(x["q"].nbytes)
