"""Forward mode and second derivatives: `Unsupported` by name through NSA kernels, else right.

The right value is a finite difference of the function, or of its gradient by torch.autograd.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from cases import boundaries, inputs, layer_of, small
from nsa_core import (
    NSAttention,
    Unsupported,
    block_attention,
    block_attention_decode,
    nsa_attention,
)
from nsa_core.config import COMPRESS_KINDS
from nsa_core.layer.fp32_product import fp32_linear
from nsa_core.layer.phi.kinds import make_phi
from nsa_core.parallel import collectives, heads
from nsa_core.plan.default_plan import default_plan

CONFIG, LENGTH = small(), 13
FORWARD = r"forward-mode differentiation of NSA .* is not supported; use reverse mode"
TWICE = "NSA kernels are differentiable once, not twice; for a second derivative, take finite"
Function = Callable[[torch.Tensor], torch.Tensor]
STEP = 1e-5


def loss_of(f: Function) -> Function:
    return lambda x: f(x).square().sum()


def gradient(f: Function, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(loss_of(f)(leaf), leaf)[0]


def difference(f: Function, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return the derivative of ``f`` at ``x`` in the direction ``t``."""
    return (f(x + STEP * t) - f(x - STEP * t)) / (2 * STEP)


def dual(f: Function, x: torch.Tensor, t: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent


def flat_product(derivative: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return the product of a Jacobian [..., *t.shape] with ``t``."""
    return (derivative * t).sum(tuple(range(-t.dim(), 0)))


def twice(f: Function, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad(loss_of(f)(leaf), leaf, create_graph=True)
    return torch.autograd.grad((first * t).sum(), leaf)[0]


def reverse_over_dual(f: Function, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    with forward_ad.dual_level():
        value = loss_of(f)(forward_ad.make_dual(leaf, t))
        return torch.autograd.grad(forward_ad.unpack_dual(value).tangent, leaf)[0]


# Each takes (f, x, t) and returns the derivative of f in the direction t ...
FIRST = {
    "jvp": lambda f, x, t: jvp(f, (x,), (t,))[1],
    "jacfwd": lambda f, x, t: flat_product(jacfwd(f)(x), t),
    "vmap(jvp)": lambda f, x, t: vmap(lambda x, t: jvp(f, (x,), (t,))[1])(x[None], t[None])[0],
    "jvp(vmap)": lambda f, x, t: jvp(vmap(f), (x[None],), (t[None],))[1][0],
    "forward_ad": dual,
    "forward_ad without grad": lambda f, x, t: torch.no_grad()(dual)(f, x, t),
}
# ... or that of the gradient of sum(f^2).
SECOND = {
    "jvp(grad)": lambda f, x, t: jvp(grad(loss_of(f)), (x,), (t,))[1],
    "grad(jvp)": lambda f, x, t: grad(lambda x: jvp(loss_of(f), (x,), (t,))[1])(x),
    "jvp(vjp)": lambda f, x, t: jvp(lambda x: vjp(loss_of(f), x)[1](x.new_ones(()))[0], (x,), (t,))[
        1
    ],
    "jvp(vmap(grad))": lambda f, x, t: jvp(vmap(grad(loss_of(f))), (x[None],), (t[None],))[1][0],
    "jacfwd(jacrev)": lambda f, x, t: flat_product(jacfwd(jacrev(loss_of(f)))(x), t),
    "jacrev(jacfwd)": lambda f, x, t: flat_product(jacrev(jacfwd(loss_of(f)))(x), t),
    "jacrev(jacrev)": lambda f, x, t: flat_product(jacrev(jacrev(loss_of(f)))(x), t),
    "hessian": lambda f, x, t: flat_product(hessian(loss_of(f))(x), t),
    "grad(grad)": lambda f, x, t: grad(lambda x: (grad(loss_of(f))(x) * t).sum())(x),
    "forward_ad(grad)": lambda f, x, t: dual(grad(loss_of(f)), x, t),
    "create_graph": twice,
    "autograd.functional": lambda f, x, t: torch.autograd.functional.hvp(loss_of(f), x, t)[1],
    "reverse over forward_ad": reverse_over_dual,
}


def of_output(f: Function, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The tangent of dx for a tangent ``t`` of dO, of an eager call."""
    leaf = x.detach().clone().requires_grad_()
    y = f(leaf)
    return dual(lambda do: torch.autograd.grad(y, leaf, do)[0], torch.ones_like(y), t)


# The tangent of the gradient for a tangent t of the gradient of the output.
DUAL_GRADIENT = {
    "jvp(pullback)": lambda f, x, t: jvp(vjp(f, x)[1], (torch.ones_like(t),), (t,))[1][0],
    "dual gradient": of_output,
}
ONLY_REVERSE = ("jacrev(jacrev)", "grad(grad)", "create_graph", "autograd.functional")


def expected(nesting: str, f: Function, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    if nesting in FIRST:
        return difference(f, x, t)
    if nesting in SECOND:
        return difference(lambda x: gradient(f, x), x, t)
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf, t)[0]


def along(f: Function, x: torch.Tensor) -> tuple[Function, torch.Tensor]:
    """Return ``f`` as a function of two numbers, the steps along two directions, and their zero."""
    directions = torch.randn(2, *x.shape, dtype=x.dtype)
    return lambda steps: f(x + torch.tensordot(steps, directions, 1)), x.new_zeros(2)


def direction(nesting: str, f: Function, x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(f(x) if nesting in DUAL_GRADIENT else x).detach()


Functions = dict[str, tuple[Function, torch.Tensor]]


def kernel_functions() -> Functions:
    """Functions through NSA kernels by name, each with a point."""
    torch.manual_seed(0)
    x, cu = torch.randn(1, LENGTH, 24, dtype=torch.float64), boundaries(9, 4)
    layer, recomputing = layer_of(), layer_of(gate="mlp", shared_kv=True, qk_norm=True)
    recomputing.recompute = True
    i = inputs(CONFIG, 1, LENGTH)
    blocks = torch.zeros(1, LENGTH, 2, 1, dtype=torch.long)
    plan = default_plan(CONFIG, x.device, x.dtype, False, True)

    def attend(**changed: Any) -> torch.Tensor:
        return nsa_attention(**{**i._asdict(), **changed}, config=CONFIG)

    def attend_blocks(**changed: Any) -> torch.Tensor:
        tensors = {"q": i.q, "k": i.k[0], "v": i.v[0], "blocks": blocks, **changed}
        return block_attention(**tensors, block_size=8)

    functions: Functions = {
        "NSAttention": (layer, x),
        "NSAttention, recompute": (recomputing, x),
        "NSAttention, frozen": (layer_of().requires_grad_(False), x),
        "NSAttention, packed": (lambda x: layer(x, cu), x[0]),
        "nsa_attention, q": (lambda q: attend(q=q), i.q),
        "nsa_attention, k of cmp": (lambda k: attend(k=(k, *i.k[1:])), i.k[0]),
        "nsa_attention, v": (lambda v: attend(v=v), i.v[0]),
        "nsa_attention, gates": (lambda gates: attend(gates=gates), i.gates),
        "block_attention, q": (lambda q: attend_blocks(q=q), i.q),
        "block_attention, v": (lambda v: attend_blocks(v=v), i.v[0]),
        "cmp": (lambda k: plan.cmp(i.q, k, i.v[0][:, :2])[0], i.k[0][:, :2]),
        "sel": (lambda k: plan.sel(i.q, k, i.v[1], blocks.int())[0], i.k[1]),
        "win": (lambda v: plan.win(i.q, i.k[2], v)[0], i.v[2]),
        "combine": (lambda o: plan.combine(i.gates, o, o, o), torch.randn_like(i.q)[..., :6]),
    }
    for name in ("qkv.weight", "gate.weight", "phi_k.up.bias"):
        replaced = functools.partial(replace, layer, name, x)
        functions[f"NSAttention, {name}"] = replaced, layer.get_parameter(name).detach()
    return functions


def replace(layer: NSAttention, name: str, x: torch.Tensor, parameter: torch.Tensor) -> Any:
    return functional_call(layer, {name: parameter}, (x,))


def other_functions() -> Functions:
    """Functions of the layer in which no tangent reaches an NSA kernel, each with a point."""
    torch.manual_seed(0)
    x, keys = torch.randn(1, 12, 24, dtype=torch.float64), torch.randn(1, 12, 2, 4).double()
    layer = layer_of()
    options = {"shared_kv": True, "qk_norm": True, "rope_before_compress": True}
    functions: Functions = {
        "the weight of out": (
            functools.partial(replace, layer, "out.weight", x),
            layer.out.weight.detach(),
        ),
        "a factor of the output": (lambda factor: factor * layer(x), x[..., :1]),
        "project": (functools.partial(project, layer_of(compress="mean")), x),
        "project, other options": (
            functools.partial(project, layer_of(compress="conv", **options)),
            x,
        ),
    }
    for kind in COMPRESS_KINDS:
        functions[f"phi {kind}"] = make_phi(kind, CONFIG.geometry, 4).double(), keys
    return functions


def project(layer: NSAttention, x: torch.Tensor) -> torch.Tensor:
    q, k, v, k_cmp, v_cmp = layer.project(x)
    return torch.cat([each.sin().flatten() for each in (q, *k[1:], *v[1:], k_cmp, v_cmp)])


KERNELS, OTHERS = kernel_functions(), other_functions()
NESTINGS = {**FIRST, **SECOND, **DUAL_GRADIENT}


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_raise_unsupported_at_every_nesting(name: str, nesting: str) -> None:
    f, x = along(*KERNELS[name])
    message = TWICE if nesting in ONLY_REVERSE else FORWARD
    if "packed" in name and ("vmap" in nesting or nesting.startswith("jac")):
        message = f"{message}|packed documents .* are not supported under torch.func.vmap"
    with pytest.raises(Unsupported, match=message):
        NESTINGS[nesting](f, x, direction(nesting, f, x))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_refuse_a_batch_of_gradients(name: str) -> None:
    f, x = KERNELS[name]
    leaf = x.detach().clone().requires_grad_()
    y = f(leaf)
    batch = torch.ones(2, *y.shape, dtype=y.dtype)
    with pytest.raises(Unsupported, match=r"a batch of gradients .* use torch\.func\.jacrev"):
        torch.autograd.grad(y, leaf, batch, is_grads_batched=True)


# PyTorch's backward of torch.logsumexp raises an error for a dual tensor.
NOT_IN_TORCH = ("phi attn_pool", "reverse over forward_ad")
CASES = [case for case in itertools.product(OTHERS, NESTINGS) if case != NOT_IN_TORCH]


@pytest.mark.parametrize(("name", "nesting"), CASES)
def test_derivatives_that_meet_no_kernel_are_right(name: str, nesting: str) -> None:
    f, x = along(*OTHERS[name])
    t = direction(nesting, f, x)
    if name in ("phi mlp", "phi linear") and nesting in ("create_graph", "autograd.functional"):
        with pytest.raises(Unsupported, match=TWICE):  # of one node that replaces the operators
            NESTINGS[nesting](f, x, t)
        return
    torch.testing.assert_close(
        NESTINGS[nesting](f, x, t), expected(nesting, f, x, t), rtol=1e-6, atol=1e-6
    )


def test_linearize_raises_unsupported() -> None:
    f, x = KERNELS["block_attention, q"]
    with pytest.raises(Unsupported, match=FORWARD):
        linearize(f, x)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_are_never_silently_zero(recompute: bool, frozen: bool) -> None:
    """dgates depends on q, k and v through the outputs of the branches, which have no graph."""
    i = inputs(CONFIG, 1, LENGTH)
    q, *kv, gates = tensors = [i.q, *i.k, *i.v, i.gates]
    for first in [gates] if frozen else tensors:
        for second in tensors:
            for x in tensors:
                x.requires_grad_(x is first or x is second or not frozen)
            o = nsa_attention(q, kv[:3], kv[3:], gates, config=CONFIG, recompute=recompute)
            (once,) = torch.autograd.grad(o.sum(), first, create_graph=True)
            with pytest.raises(Unsupported, match=TWICE):
                torch.autograd.grad(once.sum() + second.sum(), second)


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_second_derivatives_of_phi_are_never_silently_zero(kind: str) -> None:
    """Also if the gradient of the output depends on neither the input nor the parameters."""
    phi, x = make_phi(kind, CONFIG.geometry, 4).double(), torch.randn(1, 16, 2, 4).double()
    tensors, weight = [x.requires_grad_(), *phi.parameters()], torch.ones((), requires_grad=True)
    once = torch.autograd.grad((phi(x) * weight).sum(), tensors, create_graph=True)
    for second in tensors:
        total = sum(g.square().sum() for g in once) + second.sum()
        with pytest.raises(Unsupported, match=TWICE):
            torch.autograd.grad(total, second, retain_graph=True)


def test_fp32_products_have_second_derivatives_and_refuse_tangents() -> None:
    x, w = torch.randn(3, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    for f, point in (
        (lambda x: fp32_linear(x, w, None), x),
        (lambda w: fp32_linear(x, w, None), w),
    ):
        t = torch.randn_like(point)
        with pytest.raises(Unsupported, match=FORWARD):
            jvp(f, (point,), (t,))
        with pytest.raises(Unsupported, match=FORWARD):
            dual(f, point, t)
        of_floats = w.float() if point is x else x.float()
        gram = 2 * of_floats.mT @ of_floats  # the Hessian of the sum of squares, for every row
        torch.testing.assert_close(
            twice(f, point, t).float(), t.float() @ gram, rtol=0.05, atol=0.5
        )


def test_decode_steps_refuse_tangents() -> None:
    layer, x = layer_of(), torch.randn(1, 1, 24, dtype=torch.float64)
    i, lengths = inputs(CONFIG, 1, 16), torch.tensor([16], dtype=torch.int32)
    blocks = torch.zeros(1, 1, 2, 1, dtype=torch.int32)

    def decode(q: torch.Tensor) -> torch.Tensor:
        return block_attention_decode(q, i.k[0], i.v[0], blocks, lengths=lengths, block_size=8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x, cache=layer.new_cache(1, 32))

    def step_with(weight: torch.Tensor) -> Any:
        options = {"cache": layer.new_cache(1, 32)}
        return functional_call(layer, {"qkv.weight": weight}, (x,), options)

    q, weight = i.q[:, :1], layer.qkv.weight.detach()
    for f, point in ((decode, q), (step, x), (step_with, weight)):
        for nesting in ("jvp", "forward_ad", "forward_ad without grad"):
            with pytest.raises(Unsupported, match=FORWARD):
                FIRST[nesting](f, point, point)
        inner = functools.partial(factor_gradient, f)
        with pytest.raises(Unsupported, match=FORWARD):
            jvp(inner, (point,), (point,))
    for nesting in ("vmap(jvp)", "jvp(vmap)"):
        with pytest.raises(Unsupported, match=FORWARD):
            FIRST[nesting](decode, q, q)


def test_calls_with_an_older_cache_refuse_tangents_and_mapped_axes() -> None:
    layer, x = layer_of(), torch.randn(2, 3, 24, dtype=torch.float64)
    cache, weight = layer.new_cache(2, 32), layer.qkv.weight.detach()

    def step(x: torch.Tensor) -> torch.Tensor:
        return layer(x, cache=cache)

    def step_with(weight: torch.Tensor) -> Any:
        return functional_call(layer, {"qkv.weight": weight}, (x,), {"cache": cache})

    for f, point in ((step, x), (step_with, weight)):
        with pytest.raises(Unsupported, match=FORWARD):
            jvp(f, (point,), (point,))
        with pytest.raises(Unsupported, match="one batch"):
            vmap(f)(torch.stack([point] * 4))
    with pytest.raises(Unsupported, match="one batch"):
        vmap(lambda new: layer(x, cache=cache, new=new))(torch.ones(4, 2, dtype=torch.int64))
    torch.testing.assert_close(step(x), layer(x))  # nothing was written
    assert cache.host_lengths() == [3, 3]


def factor_gradient(f: Function, x: torch.Tensor) -> torch.Tensor:
    """A function of x inside another level of torch.func."""
    return grad(lambda factor: (factor * f(x)).sum())(x.new_ones(()))


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield collectives.group_name(None)
    dist.destroy_process_group()


def test_collectives_refuse_tangents(group: str) -> None:
    """torch.library.custom_op drops them silently."""
    x, rows = torch.randn(4, 2, 2), (4, "contiguous", [1, 1], group)
    for f, point in (
        (lambda x: collectives.gather_rows(x, group, torch.float32), x),
        (lambda x: collectives.scatter_sum(x, group), x),
        (lambda x: collectives.sum_ranks(x, group), x),
        (lambda x: collectives.extend([x, x], *rows)[0], x),
        (lambda x: collectives.extend_back([x, x], *rows, torch.float32)[0], x[None]),
        (lambda x: heads.to_heads([x], "contiguous", group)[0], x),
        (lambda x: heads.to_rows([x], "contiguous", group)[0], x),
    ):
        for nesting in (
            "jvp",
            "forward_ad",
            "jvp(vmap)",
            "jvp(grad)",
            "grad(jvp)",
            "dual gradient",
        ):
            with pytest.raises(Unsupported, match=FORWARD):
                NESTINGS[nesting](f, point, direction(nesting, f, point))


@pytest.mark.parametrize("name", ["NSAttention", "block_attention, q"])
def test_compiled_calls_refuse_tangents(name: str) -> None:
    f, x = KERNELS[name]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=FORWARD):
        dual(torch.compile(f, fullgraph=True, backend="eager"), x, x)
    if name == "NSAttention":
        return  # its first check has raised, before most of the tracing
    with pytest.raises(torch._dynamo.exc.Unsupported, match=FORWARD):
        torch.compile(lambda x: jvp(f, (x,), (x,)), fullgraph=True, backend="eager")(x)


def test_the_gradient_of_a_compiled_call_refuses_tangents() -> None:
    """Its code may have dropped them, so that a level of forward_ad is enough."""
    f, x = KERNELS["block_attention, q"]
    compiled, leaf = (
        torch.compile(f, fullgraph=True, backend="aot_eager"),
        x.clone().requires_grad_(),
    )
    y = compiled(leaf)
    with pytest.raises(Unsupported, match=FORWARD), forward_ad.dual_level():
        torch.autograd.grad(y, leaf, torch.ones_like(y))
    with pytest.raises(RuntimeError, match=r"double backward|create_graph=False"):
        twice(compiled, x, x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="functorch"):
        jvp(compiled, (x,), (x,))
