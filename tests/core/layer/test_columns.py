"""The columns that torch.compile splits on CUDA give the outputs and gradients of eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core import NSAConfig, NSAttention
from nsa_core.layer import projection, split_product

SIZES: dict[str, Any] = {
    "dim": 24,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 16,
    "num_selected_blocks": 3,
    "window_size": 24,
}


def compiled_and_eager(config: NSAConfig, packed: bool) -> list[list[torch.Tensor]]:
    """Return the output and the gradients of x and of the parameters, compiled and eager."""
    torch.manual_seed(0)
    layer = NSAttention(config, backends="sdpa").double()
    boundaries = (torch.tensor([0, 30, 75], dtype=torch.int32),) if packed else ()
    x = torch.randn(*(() if packed else (2,)), 75, config.dim, dtype=torch.float64)
    results = []
    for function in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
        inputs = [x.clone().requires_grad_(), *layer.parameters()]
        y = function(inputs[0], *boundaries)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({"v_head_dim": 12}, False),
        ({"qk_norm": True}, True),
        ({"rope_before_compress": True}, False),
        ({"rope": False}, False),
    ],
    ids=["Dk != Dv", "qk_norm, packed", "rope before phi", "no rope"],
)
def test_split_columns_give_the_gradients_of_eager_calls(
    options: dict[str, Any], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = []

    def split(x: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, ...]:
        splits.append(tuple(widths))
        return split_product.split_columns(x, widths)

    monkeypatch.setattr(split_product, "DEVICES", ("cpu",))
    monkeypatch.setattr(projection, "split_columns", split)
    compiled, eager = compiled_and_eager(NSAConfig(**SIZES, **options), packed)
    assert len(splits) == 1
    for actual, expected in zip(compiled, eager):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_parts_are_views_and_one_operator_joins_their_gradients() -> None:
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    parts = split_product.split_columns(x, (2, 1, 3))
    assert [part.shape for part in parts] == [(3, 2), (3, 1), (3, 3)]
    assert all(part.untyped_storage().data_ptr() == x.data_ptr() for part in parts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (gradient,) = torch.autograd.grad((parts[0] * 2).sum() + parts[2].sum(), x)
    assert gradient.tolist() == [[2.0, 2.0, 0.0, 1.0, 1.0, 1.0]] * 3  # of an unused part: 0
    assert sum(event.name == "nsa_core::join_columns" for event in profile.events()) == 1


def test_the_operator_is_registered_for_the_compiler() -> None:
    parts = [torch.randn(2, 5, width) for width in (3, 1)]
    torch.library.opcheck(torch.ops.nsa_core.join_columns.default, (parts,))


class Own(torch.Tensor):
    """A subclass, as DTensor is, which may define the join of its own parts."""


@pytest.mark.parametrize(
    ("device", "call", "expected"),
    [
        ("cpu", lambda f, x: torch.compile(f, backend="eager")(x), True),
        ("cuda", lambda f, x: torch.compile(f, backend="eager")(x), False),
        ("cpu", lambda f, x: torch.compile(f, backend="eager")(x.as_subclass(Own)), False),
        ("cpu", lambda f, x: f(x), False),
        ("cpu", lambda f, x: torch.export.export(f, (x,), strict=True).module()(x), False),
        ("cpu", lambda f, x: torch.export.export(f, (x,), strict=False).module()(x), False),
        ("cpu", lambda f, x: torch.compile(torch.func.vmap(f), backend="eager")(x[None]), False),
    ],
    ids=[
        "compiled",
        "another device",
        "subclass",
        "eager",
        "exported",
        "exported, not strict",
        "transformed",
    ],
)
def test_only_compiled_calls_on_cuda_split_columns(
    device: str, call: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Splits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (1.0 if split_product.joins_columns(x) else 0.0)

    monkeypatch.setattr(split_product, "DEVICES", (device,))
    assert call(Splits(), torch.zeros(2)).flatten().tolist() == [float(expected)] * 2
