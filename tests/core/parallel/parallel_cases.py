"""Cases that run on every rank: a layer on several ranks against the same layer on one process."""

from __future__ import annotations

import collections
import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nsa_core.parallel
from cases import layer_of
from nsa_core import NSAError, NSAttention, resolve
from nsa_core.parallel import (
    HeadParallel,
    Shards,
    clip_gradients,
    whole_parameters,
)
from sequence_mutants import mutated

# name -> rows, and documents or None for a batch of two sequences
FORMS: dict[str, tuple[int, list[int] | None]] = {
    "batch": (112, None),
    "packed": (112, [0, 5, 55, 55, 58, 80, 112]),
    "one document and a tail": (112, [0, 1, 108, 112]),
    "documents end at pieces": (112, [0, 28, 56, 84, 112]),
    "pieces shorter than l and w": (24, [0, 3, 20, 24]),
    "short batch": (24, None),
    "uneven pieces": (104, [0, 104]),  # the stride does not divide a piece
}


class Problem(NamedTuple):
    """A layer, its input, the output gradient, and the results of one process.

    Attributes:
        options: fields of the config.
        x, up: [2, T, dim], or packed [T, dim].
        cu_seqlens: the documents.
        y, dx: the output and the gradient of x.
        heads: the input of the linear layer out.
        grads: gradients of the parameters.
    """

    options: dict[str, Any]
    x: torch.Tensor
    up: torch.Tensor
    cu_seqlens: torch.Tensor | None
    y: torch.Tensor
    dx: torch.Tensor
    heads: torch.Tensor
    grads: dict[str, torch.Tensor]

    def layer(self) -> NSAttention:
        """Return the layer, with the same parameters each time."""
        torch.manual_seed(1)
        layer = layer_of(self.x.dtype, **self.options)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(short(parameter))
        return layer


def short(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to multiples of 2^-8: sums of their products are exact, in any order."""
    return (x * 256).round() / 256 if x.dtype == torch.float64 else x


def problem(form: str, dtype: torch.dtype = torch.float64, **options: Any) -> Problem:
    """Return a problem and its results on one process."""
    total, bounds = FORMS[form]
    torch.manual_seed(2)
    shape = (2, total, 24) if bounds is None else (total, 24)
    x, up = short(torch.randn(2, *shape, dtype=torch.float64).to(dtype)).unbind(0)
    documents = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return solved(Problem(options, x, up, documents, x, x, x, {}))


def solved(case: Problem) -> Problem:
    layer, x = case.layer(), case.x.clone().requires_grad_()
    heads = inputs_of(layer.out)
    y = layer(x, case.cu_seqlens)
    (y * case.up).sum().backward()
    assert x.grad is not None
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return case._replace(y=y.detach(), dx=x.grad, heads=heads[0], grads=grads)


def inputs_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a list that receives the input of each call of a module."""
    inputs: list[torch.Tensor] = []
    module.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    return inputs


def divided(world: int, layer: Any, **style: Any) -> Any:
    """Return ``layer`` with the style ContextParallel over all ranks."""
    from nsa_core.parallel import context  # mutants replace the class

    mesh = init_device_mesh("cpu", (world,))
    return parallelize_module(layer, mesh, context.ContextParallel(**style))


def relative_error(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Return the largest error relative to the largest element, or to ``least`` if it is larger."""
    size = expected.abs().max().clamp(min=max(least, 1e-12))
    return float((actual.detach() - expected).abs().max() / size)


def gradient_errors(
    grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Return the error of each gradient; those that are 0 by construction hold rounding errors."""
    least = 0.01 * max(float(grad.abs().max()) for grad in expected.values())
    return {name: relative_error(grads[name], expected[name], least) for name in expected}


def summed(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sum gradients over the ranks, in float64."""
    result = {}
    for name, grad in grads.items():
        result[name] = grad.double()
        dist.all_reduce(result[name])
    return result


def equality(
    rank: int, world: int, *, form: str, wrap: str = "", layout: str, mode: str, **options: Any
) -> dict[str, Any]:
    """Return the errors of y, dx and the parameters' gradients, and whether the heads are equal.

    Args:
        rank: this rank.
        world: number of ranks.
        form: name of the documents.
        wrap: "compile" or "checkpoint" runs the layer in it; "compile and recompute" also with
            recompute.
        layout: the layout.
        mode: the mode.
        options: fields of the config.
    """
    case = problem(form, **options)
    shards = Shards(len(case.x) if case.x.dim() == 2 else case.x.shape[1], world, rank, layout)
    layer = divided(world, case.layer(), mode=mode, layout=layout)
    heads = inputs_of(layer.out)
    x = shards.take(case.x, -2).clone().requires_grad_()
    if wrap.startswith("compile"):
        torch._dynamo.reset()
        layer.recompute = wrap.endswith("recompute")
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, case.cu_seqlens)
    elif wrap == "checkpoint":
        y = checkpoint(layer, x, case.cu_seqlens, use_reentrant=False)
    else:
        y = layer(x, case.cu_seqlens)
    (y * shards.take(case.up, -2)).sum().backward()
    expected = shards.take(case.y, -2)
    grads = summed({n: p.grad for n, p in layer.named_parameters() if p.grad is not None})
    return {
        "y": relative_error(y, expected),
        "dx": relative_error(x.grad, shards.take(case.dx, -2)),
        "parameters": max(gradient_errors(grads, case.grads).values()),
        # Not of y: the sums of out are rounded, in an order that depends on the number of rows.
        "equal": torch.equal(heads[0], shards.take(case.heads, -2)),
    }


def rounded(rank: int, world: int, *, dtype: torch.dtype, layout: str, mode: str) -> dict[str, Any]:
    """Return y, dx and the parameters' gradients of several ranks, one process, and float64.

    All blocks are selected, because roundings may swap blocks of nearly equal scores.
    """
    case = problem("packed", dtype, num_selected_blocks=14)
    exact = solved(case._replace(x=case.x.double(), up=case.up.double()))
    truth_layer = case.layer().double()
    x64 = exact.x.clone().requires_grad_()
    y64 = truth_layer(x64, case.cu_seqlens)
    (y64 * exact.up).sum().backward()
    shards = Shards(len(case.x), world, rank, layout)
    layer = divided(world, case.layer(), mode=mode, layout=layout)
    x = shards.take(case.x).clone().requires_grad_()
    y = layer(x, case.cu_seqlens)
    (y * shards.take(case.up)).sum().backward()
    grads = summed({n: p.grad for n, p in layer.named_parameters()})
    whole = [shards.whole(t.detach()) for t in (y, x.grad)]
    truth = {n: p.grad for n, p in truth_layer.named_parameters()}
    return {
        "y": (whole[0], case.y, y64.detach()),
        "dx": (whole[1], case.dx, x64.grad),
        **{name: (grads[name], case.grads[name], truth[name]) for name in grads},
    }


def data_parallel(rank: int, world: int, *, kind: str, layout: str, mode: str) -> dict[str, float]:
    """Return the errors of the gradients of two accumulated parts under DDP or FSDP2.

    Both divide the sum over the ranks by their number.
    """
    case = problem("packed")
    shards = Shards(len(case.x), world, rank, layout)
    layer = divided(world, case.layer(), mode=mode, layout=layout)
    model: Any = fully_shard(layer) if kind == "fsdp" else DistributedDataParallel(layer)
    for last in (False, True):
        if kind == "fsdp":
            model.set_requires_gradient_sync(last)
        waits = kind == "ddp" and not last
        with model.no_sync() if waits else contextlib.nullcontext():
            y = model(shards.take(case.x), case.cu_seqlens)
            (y * shards.take(case.up)).sum().backward()
    grads = {}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad.full_tensor() if kind == "fsdp" else parameter.grad
        grads[name] = grad * world / 2
    return gradient_errors(grads, case.grads)


def grid(rank: int, world: int, *, mode: str) -> float:
    """Return the error of the gradients of 2 x P / 2 ranks: data parallel x context parallel."""
    both = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    case, style = problem("packed"), nsa_core.parallel.ContextParallel(mode)
    layer = parallelize_module(case.layer(), both["cp"], style)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    shards = Shards(len(case.x), world // 2, both["cp"].get_local_rank())
    sign = 1 - 2 * both["dp"].get_local_rank()  # the second sequence is the first, negated
    second = solved(case._replace(x=-case.x))
    y = layer(shards.take(sign * case.x), case.cu_seqlens)
    (y * shards.take(case.up)).sum().backward()
    expected = {name: case.grads[name] + second.grads[name] for name in case.grads}
    grads = {n: p.grad.full_tensor() * world for n, p in layer.named_parameters()}  # type: ignore[union-attr]
    return max(gradient_errors(grads, expected).values())


class Collectives(TorchDispatchMode):
    """Count the operators of nsa_core.parallel; torch's own collectives run inside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        self.elements: list[int] = []
        self.tensors: list[int] = []  # number of tensors of each call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("nsa_parallel", "c10d", "_c10d_functional"):
            self.counts[func._opname] += 1
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.elements.append(sum(x.numel() for x in tensors))
            self.tensors.append(len(tensors))
        return func(*args, **(kwargs or {}))


def counted(rank: int, world: int, *, layout: str, mode: str) -> tuple[dict[str, int], ...]:
    """Return the number of collectives of each kind in the forward and in the backward."""
    case = problem("packed")
    layer = divided(world, case.layer(), mode=mode, layout=layout)
    x = Shards(len(case.x), world, rank, layout).take(case.x).requires_grad_()
    with Collectives() as forward:
        y = layer(x, case.cu_seqlens)
    with Collectives() as backward:
        y.sum().backward()
    return dict(forward.counts), dict(backward.counts)


def refusal(rank: int, world: int, *, of: str) -> str:
    """Return the error of something that the style refuses."""
    layer = divided(world, problem("packed").layer(), mode="sequence")
    x, mesh = torch.zeros(2, 8, 24, dtype=torch.float64), init_device_mesh("cpu", (world,))

    def heads(module: Any) -> Any:
        return parallelize_module(module, mesh, HeadParallel())

    def sharded(module: Any) -> Any:
        for linear in (module.qkv, module.out, module.gate):
            fully_shard(linear, mesh=mesh)
        return module

    def partly_sharded(*names: str) -> Any:
        module = layer_of(torch.float64, qk_norm=True)
        for name in names:
            fully_shard(module.get_submodule(name), mesh=mesh)
        return module

    def adapted(module: Any) -> Any:
        module.qkv = torch.nn.ModuleDict({"base_layer": module.qkv})
        return module

    actions = {
        "new_cache": lambda: layer.new_cache(1, 64),
        "a cache": lambda: layer(x, cache=object()),
        "new": lambda: layer(x, new=[1, 2]),
        "a transform": lambda: torch.func.grad(lambda x: layer(x).sum())(x),
        "a transform of divided heads": lambda: torch.func.vmap(
            heads(problem("packed").layer()), in_dims=1
        )(x[None]),
        "an odd number of rows": lambda: layer(x[:, :7]),
        "a plan for whole sequences": lambda: layer(x, plan=problem("packed").layer().plan),
        "a plan of other sizes": lambda: layer(
            x,
            plan=resolve(
                layer_of(window_size=10).config, partial=True, dtype=x.dtype, needs_grad=True
            ),
        ),
        "documents of other rows": lambda: layer(x[0], torch.tensor([0, 8], dtype=torch.int32)),
        "a second style": lambda: divided(world, layer),
        "another module": lambda: divided(world, torch.nn.Linear(2, 2)),
        "too many ranks for heads": lambda: divided(
            world, layer_of(n_heads=3, n_kv_heads=3), mode="heads"
        ),
        "another module for heads": lambda: heads(torch.nn.Linear(2, 2)),
        "too many ranks for groups": lambda: heads(layer_of(n_heads=3, n_kv_heads=3)),
        "a sharded layer for heads": lambda: heads(sharded(problem("packed").layer())),
        "a sharded phi for heads": lambda: heads(partly_sharded("phi_k")),
        "a sharded norm for heads": lambda: heads(partly_sharded("q_norm")),
        "a cache of divided heads": lambda: heads(problem("packed").layer()).new_cache(1, 64),
        "adapters on divided heads": lambda: whole_parameters(
            adapted(heads(problem("packed").layer()))
        ),
        "a mesh of two dimensions": lambda: parallelize_module(
            problem("packed").layer(),
            init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp")),
            nsa_core.parallel.ContextParallel(),
        ),
    }
    try:
        actions[of]()
    except NSAError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def no_rows(rank: int, world: int, *, mode: str, shape: list[int]) -> tuple[list[int], list[int]]:
    """Return the shapes of y and dx for a sequence without rows, or for no sequence."""
    layer = divided(world, problem("batch").layer(), mode=mode)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x, torch.tensor([0, 0], dtype=torch.int32) if len(shape) == 2 else None)
    y.sum().backward()
    assert x.grad is not None
    return list(y.shape), list(x.grad.shape)


def gathered(rank: int, world: int, *, layout: str) -> bool:
    """Return whether Shards.whole inverts take, with the gradient of one process."""
    shards = Shards(16, world, rank, layout)
    x = torch.randn(3, 16, 2, generator=torch.Generator().manual_seed(0))
    local = shards.take(x, 1).clone().requires_grad_()
    whole = shards.whole(local, 1)
    (whole * x).sum().backward()
    assert local.grad is not None
    return torch.equal(whole, x) and torch.equal(local.grad, world * shards.take(x, 1))


def head_parallel(
    rank: int, world: int, *, form: str, wrap: str = "", **options: Any
) -> dict[str, Any]:
    """Return the errors of a layer whose heads are divided, its gathered and clipped tensors."""
    case = problem(form, **options)
    mesh = init_device_mesh("cpu", (world,))
    layer = parallelize_module(case.layer(), mesh, HeadParallel())
    whole = whole_parameters(layer)
    if wrap == "fsdp":  # over data-parallel ranks, of which there is one
        both = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
        fully_shard(layer, mesh=both["dp"])
    x = case.x.clone().requires_grad_()
    y = layer(x, case.cu_seqlens)
    (y * case.up).sum().backward()
    original = dict(case.layer().named_parameters())
    grads = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        grads[name] = getattr(parameter.grad, "full_tensor", lambda g=parameter.grad: g)().clone()
    norm = torch.stack([grad.norm() for grad in case.grads.values()]).norm()
    norm_before = clip_gradients(layer, float(norm) / 2)
    halves = {name: grad * (norm / 2 / (norm + 1e-6)) for name, grad in grads.items()}
    clipped = {
        name: getattr(p.grad, "full_tensor", lambda g=p.grad: g)()
        for name, p in layer.named_parameters()
    }
    divided = parallelize_module(case.layer(), mesh, HeadParallel())
    with torch.no_grad():
        for name, parameter in divided.named_parameters():
            parameter.copy_(grads[name])
    return {
        "y": relative_error(y, case.y),
        "dx": relative_error(x.grad, case.dx),
        "parameters": max(gradient_errors(whole_parameters(divided), case.grads).values()),
        "norm": relative_error(norm_before, norm),
        "clipped": max(gradient_errors(clipped, halves).values()),
        "whole": all(torch.equal(whole[name], original[name]) for name in original),
    }


def mutant(
    rank: int, world: int, *, module: str, changes: dict[str, str], form: str, layout: str
) -> dict[str, Any]:
    """Return the errors of :func:`equality` with a planted fault."""
    with mutated(module, changes):
        return equality(rank, world, form=form, layout=layout, mode="sequence")
