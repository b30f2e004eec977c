"""HeadParallel: tensor parallelism of NSAttention layers over their key/value heads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import LinearGate, MLPGate
from nsa_core.layer.module import NSAttention, ParallelForward
from nsa_core.layer.plain_linear import are_plain
from nsa_core.parallel.agreement import agreed, is_compared, values_of_layer
from nsa_core.parallel.collectives import gather_rows, group_name, sum_dtype, sum_ranks
from nsa_core.parallel.context import heads_of_one_rank, layer_to_divide

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan
    from nsa_core.torch_ops.core_kernels import CoreInputs


class HeadParallel(ParallelStyle):
    """Divide the heads of an :class:`nsa_core.NSAttention` over the ranks of a mesh.

    Each rank holds the rows of ``qkv`` and of the gate, and the columns of ``out``, that belong to
    its n_kv_heads / P groups. x, its gradient and the output are whole on every rank, and equal to
    those of one process up to rounding: the partial outputs are summed in fp32, and so is the
    gradient of x. Biases of ``qkv`` and of the gate are divided like their rows. Compression,
    norms, the hidden layer of an MLP gate and a bias of ``out``, which is added after the sum, have
    the same parameters and gradients on all ranks. All other modules of a model stay as they are.

    Parameters become those of the rank: load a checkpoint before, and create the optimizer after
    ``parallelize_module``. :func:`whole_parameters` returns those of one process. Apply
    DistributedDataParallel or ``fully_shard`` afterwards, over the data-parallel ranks only: over
    ranks with other heads, it would mix their parameters, and only NSA_CHECK=1 finds this. Clip
    gradients with :func:`clip_gradients`.

    A mesh of one rank changes nothing. Over a cache, a layer of this style raises Unsupported.
    torch.compile cannot trace such a layer as one graph (``fullgraph=True``).

    Raises:
        InvalidInput: from ``parallelize_module``: the module is not an NSAttention, is divided
            already, has wrapped linear layers or sharded parameters, the mesh has several
            dimensions, or its size does not divide n_kv_heads.

    Example:
        >>> mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
        >>> parallelize_module(model, mesh["tp"], {"blocks.*.attn": HeadParallel()})
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=mesh["dp"])
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = layer_to_divide("HeadParallel", module, device_mesh)
        world, rank, config = device_mesh.size(), device_mesh.get_local_rank(), layer.config
        if config.n_kv_heads % world:
            raise InvalidInput(
                "HeadParallel needs a mesh whose size divides n_kv_heads:"
                f" {world} ranks do not divide {config.n_kv_heads} key/value heads"
            )
        gate = _last_of_gate(layer)
        linears = (layer.qkv, layer.out, gate)
        wrapped = [type(m).__name__ for m in linears if not _is_plain(m)]
        if wrapped:
            raise InvalidInput(
                f"HeadParallel needs plain layers qkv, out and gate, got {', '.join(wrapped)}:"
                " apply the style before wrapping or sharding the layer"
            )
        sharded = [
            f"{name} ({type(parameter).__name__})"
            for name, parameter in layer.named_parameters()
            if type(parameter) is not nn.Parameter
        ]
        if sharded:
            raise InvalidInput(
                f"HeadParallel needs parameters that are not sharded, got {', '.join(sharded)}:"
                " apply the style before fully_shard"
            )
        if world == 1:
            return module
        sections = tuple(layer._widths)
        group = group_name(device_mesh.get_group())
        layer.parallel = DividedHeads(world, rank, group, sections, _Inputs(layer))
        vars(layer)["config"] = heads_of_one_rank(config, world)  # assigning another is refused
        layer._widths = [width // world for width in layer._widths]
        _replace(layer.out, "weight", layer.out.weight.chunk(world, 1)[rank])
        for name in ("weight", "bias"):
            if (rows := getattr(layer.qkv, name)) is not None:
                _replace(layer.qkv, name, _rows(rows, sections, world, rank))
            if (rows := getattr(gate, name)) is not None:
                _replace(gate, name, rows.chunk(world)[rank])
        for linear in linears:
            linear.out_features, linear.in_features = linear.weight.shape
        return module


def _is_plain(linear: nn.Module) -> bool:
    """Return whether a linear layer has no wrapper, no hooks and no sharded parameter."""
    kind = LinearGate if isinstance(linear, LinearGate) else nn.Linear
    return are_plain(kind, linear) and type(linear.weight) is nn.Parameter


def _last_of_gate(layer: NSAttention) -> Any:
    """Return the linear layer of the gate whose rows are heads."""
    return layer.gate if isinstance(layer.gate, LinearGate) else layer.gate[-1]


def _rows(weight: torch.Tensor, sections: tuple[int, ...], world: int, rank: int) -> torch.Tensor:
    """Return the rows of a rank's groups in every section of the fused projection."""
    return torch.cat([section.chunk(world)[rank] for section in weight.split(list(sections))])


def _replace(linear: nn.Linear, name: str, value: torch.Tensor) -> None:
    """Replace a parameter by a copy of a part of it."""
    old = getattr(linear, name)
    copy = value.detach().clone(memory_format=torch.contiguous_format)
    setattr(linear, name, nn.Parameter(copy, requires_grad=old.requires_grad))


class _Replicated(torch.autograd.Function):
    """Tensors with the same values on all ranks; their gradients are summed, in one collective."""

    @staticmethod
    def forward(ctx: Any, group: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.dtypes = group, [x.dtype for x in tensors]  # of tensors that need gradients
        return tuple([x.view_as(x) for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        precise = torch.float32
        for dtype in ctx.dtypes:
            precise = sum_dtype(dtype, precise)
        total = sum_ranks(torch.cat([g.flatten().to(precise) for g in grads]), ctx.group)
        parts = total.split([g.numel() for g in grads])
        return (None, *[p.view(g.shape).to(g.dtype) for p, g in zip(parts, grads)])


class _Summed(torch.autograd.Function):
    """The sum over the ranks plus a bias; their gradients are the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, group: str) -> torch.Tensor:
        total: torch.Tensor = sum_ranks(x.to(sum_dtype(x.dtype, torch.float32)), group)
        if bias is not None:
            ctx.bias_dtype = bias.dtype
            total = total + bias
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        rows = grad.flatten(0, -2)
        total = rows.sum(0, dtype=sum_dtype(rows.dtype, torch.float32))
        return grad, total.to(ctx.bias_dtype), None


class _Inputs(nn.Module):
    """The part of a layer before the core; functional_call replaces its parameters."""

    def __init__(self, layer: NSAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        plan: Plan | None,
    ) -> tuple[Plan, CoreInputs]:
        """Return the plan and the inputs of the core."""
        projected = self.layer.project(x, cu_seqlens)
        return self.layer.prepare(x, projected, cu_seqlens, max_seqlen, plan)


@dataclasses.dataclass(frozen=True, eq=False)
class DividedHeads(ParallelForward):
    """The forward of a layer whose heads are divided over ranks.

    Attributes:
        world: number of ranks.
        rank: this rank.
        group: name of the process group.
        sections: rows of the undivided ``qkv`` of q, of each key and of each value.
        inputs: the part of the layer before the core.
    """

    refusal: ClassVar[str] = (
        "head parallel: this layer holds some of the heads, by HeadParallel; load"
        " whole_parameters() into a model without the style"
    )

    world: int
    rank: int
    group: str
    sections: tuple[int, ...]
    inputs: _Inputs

    def forward(
        self,
        layer: NSAttention,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        plan: Plan | None,
    ) -> torch.Tensor:
        """Apply ``layer`` to x, as NSAttention.forward.

        Raises:
            InvalidInput: as NSAttention.forward; or, with NSA_CHECK=1, the ranks do not agree.
        """

        def prepare() -> tuple[Plan, CoreInputs]:
            layer._check_input(x, cu_seqlens, max_seqlen)
            mine, replicated = self._replicated(layer, x)
            arguments = (mine, cu_seqlens, max_seqlen, plan)
            call: tuple[Plan, CoreInputs]
            call = torch.func.functional_call(self.inputs, replicated, arguments)
            return call

        def values(call: tuple[Plan, CoreInputs] | None) -> dict[str, object]:
            return values_of_layer(layer, x, cu_seqlens, max_seqlen, call and call[0])

        call = agreed(prepare, values, self.group, x)
        if is_compared(x):
            _check_heads_differ(layer.qkv.weight.detach().double(), self.group)
        o = layer.attend_with(*call, cu_seqlens, max_seqlen)
        product = _product(layer.out, o.flatten(-2))
        y: torch.Tensor = _Summed.apply(product, layer.out.bias, self.group)  # type: ignore[no-untyped-call]
        return y

    def _replicated(
        self, layer: NSAttention, x: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return x, and the parameters of which every rank has a copy, by their names in inputs.

        Their gradients are summed over the ranks; frozen ones have none.
        """
        tensors = {"x": x} | {
            f"layer.{name}": parameter
            for name, parameter in layer.named_parameters()
            if _is_replicated(name, layer) and name != "out.bias"  # its gradient is whole
        }
        trained = [name for name, tensor in tensors.items() if tensor.requires_grad]
        if trained and torch.is_grad_enabled():
            summed = _Replicated.apply(self.group, *[tensors[name] for name in trained])  # type: ignore[no-untyped-call]
            tensors |= dict(zip(trained, summed))
        return tensors.pop("x"), tensors


def _check_heads_differ(weight: torch.Tensor, group: str) -> None:
    """Check that no two ranks hold the same heads. A weight of one repeated value says nothing.

    Args:
        weight: float64, the weight of this rank's qkv.
        group: name of the process group over whose ranks the heads are divided.

    Raises:
        InvalidInput: two ranks hold the same heads. All ranks raise.
    """
    facts = torch.stack([weight.sum(), weight.square().sum(), weight.min(), weight.max()])
    every = gather_rows(facts[None], group, facts.dtype)
    every = every[every[:, 2] < every[:, 3]]
    if len(every.unique(dim=0)) < len(every):
        raise InvalidInput(
            "ranks to which HeadParallel gave different heads have the same qkv.weight: DDP or"
            " fully_shard spans them, and mixes their parameters; pass the data-parallel ranks"
            " only, as process_group of DDP or mesh of fully_shard"
        )


def _product(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a linear layer without its bias."""
    if linear.bias is None:
        return linear(x)  # type: ignore[no-any-return]
    zero = {"bias": torch.zeros_like(linear.bias)}
    return torch.func.functional_call(linear, zero, (x,))  # type: ignore[no-any-return]


def _is_replicated(name: str, layer: NSAttention) -> bool:
    """Return whether a parameter has the same values on all ranks."""
    first, _, rest = name.partition(".")
    if first == "gate":
        return isinstance(layer.gate, MLPGate) and rest.startswith("0.")
    return name == "out.bias" or first not in ("qkv", "out")


def _is_of_linear(name: str) -> bool:
    """Return whether a divided parameter belongs to a linear layer itself, not to a wrapper."""
    owner = name.rpartition(".")[0]
    return owner in ("qkv", "out", "gate") or owner.removeprefix("gate.").isdigit()


def whole_parameters(layer: NSAttention) -> dict[str, torch.Tensor]:
    """Return the parameters that the layer would have on one process, on every rank.

    All ranks must call it, those over which ``fully_shard`` shards the parameters included.

    Args:
        layer: a layer that :class:`HeadParallel` divided; any other layer returns its own.

    Returns:
        name -> copy of the parameter, for ``load_state_dict``.

    Raises:
        InvalidInput: adapters wrap a divided linear layer.
    """
    state = {name: _copy(p.detach()) for name, p in layer.named_parameters()}
    divided = layer.parallel
    if not isinstance(divided, DividedHeads):
        return state
    world = divided.world
    adapters = [n for n in state if not (_is_replicated(n, layer) or _is_of_linear(n))]
    if adapters:
        raise InvalidInput(
            "whole_parameters needs plain layers qkv, out and gate, got the parameters"
            f" {', '.join(adapters)}: merge adapters into the layers first, for example with"
            " merge_and_unload() of peft"
        )

    def gathered(x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = gather_rows(x.contiguous(), divided.group, torch.float32)
        return rows

    for name, local in state.items():
        if _is_replicated(name, layer):
            continue
        if name.startswith("qkv."):
            ranks = gathered(local).chunk(world)
            widths = [section // world for section in divided.sections]
            sections = zip(*[part.split(widths) for part in ranks])
            state[name] = torch.cat([x for parts in sections for x in parts])
        elif name == "out.weight":
            state[name] = gathered(local.t()).t().contiguous()
        else:
            state[name] = gathered(local)
    return state


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> torch.Tensor:
    """Scale the gradients of a model so that their norm over all ranks is at most ``limit``.

    ``torch.nn.utils.clip_grad_norm_`` sees the heads of this rank only. With it, each rank would
    scale the common gradients by another factor, and the copies of a parameter would drift apart.

    All ranks must call this, those over which ``fully_shard`` shards the parameters included.

    Args:
        model: a model with layers that :class:`HeadParallel` divided.
        limit: the largest norm of all gradients together.

    Returns:
        The norm before, a scalar of at least fp32.

    Example:
        >>> loss.backward()
        >>> norm = clip_gradients(model, 1.0)
        >>> optimizer.step()
    """
    groups = {
        parameter: layer.parallel.group
        for layer in model.modules()
        if isinstance(layer, NSAttention) and isinstance(layer.parallel, DividedHeads)
        for name, parameter in layer.named_parameters()
        if not _is_replicated(name, layer)
    }
    parts: dict[tuple[str | None, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            parts.setdefault((groups.get(parameter), mesh), []).append(parameter)
    squares = []
    for (group, _), parameters in parts.items():
        norm = _copy(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        square = norm.to(sum_dtype(norm.dtype, torch.float32)).square()
        squares.append(square if group is None else sum_ranks(square, group))
    total = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
    for parameters in parts.values():
        clip_grads_with_norm_(parameters, limit, total)
    return total


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, gathered over the mesh of ``fully_shard``."""
    copy: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return copy.clone()
