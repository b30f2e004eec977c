"""Check tensors against the contract: metadata always, values only if they are on the host."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias, cast

import torch

from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.limits import too_large
from nsa_core.torch_ops.autograd import is_unobserved, refuse_dual
from nsa_core.torch_ops.tensor_kinds import (
    boundaries_hint,
    check_kind,
    check_packed_transforms,
    describe_max_seqlen,
    is_strided,
    kind_problem,
)
from nsa_core.torch_ops.torch_state import autocast_enabled


class Metadata(NamedTuple):
    """The properties of a tensor that the checks read; hashable, so that results can be cached."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Metadata:
        """Return the metadata of ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def dim(self) -> int:
        """Return the number of axes, like torch.Tensor.dim()."""
        return len(self.shape)


TensorOrMetadata: TypeAlias = torch.Tensor | Metadata
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def describe(names: Sequence[str], tensors: Sequence[TensorOrMetadata]) -> str:
    """Return the name, shape, dtype and device of each tensor, for error messages."""
    return ", ".join(
        f"{n} {list(t.shape)} {dtype_name(t.dtype)} {t.device}" for n, t in zip(names, tensors)
    )


def tensor_problems(
    names: Sequence[str],
    tensors: Sequence[TensorOrMetadata],
    shapes: Sequence[Sequence[str | int]],
    packed: bool,
    sizes: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the mismatches between ``tensors`` and ``shapes``; [] if there are none.

    "Hq" must be a multiple of "G", and all tensors must be on one device.

    Args:
        names: Name of each tensor, for the messages.
        tensors: The tensors, or their metadata.
        shapes: For each tensor, a symbol or a number per axis of the [B, S, ...] layout: "B", "S",
            "Hq", "G", "Dk", 3. Equal symbols must have equal sizes.
        packed: Whether the tensors are packed and have no axis "B".
        sizes: Required sizes of some symbols.
    """
    problems: list[str] = []
    known: dict[str, int] = dict(sizes or {})
    for name, tensor, axes in zip(names, tensors, shapes):
        axes = [a for a in axes if not (packed and a == "B")]
        if tensor.dim() != len(axes):
            problems.append(f"{name} must have {len(axes)} axes {axes}, got {tensor.dim()}")
            continue
        for axis, size in zip(axes, tensor.shape):
            expected = axis if isinstance(axis, int) else known.setdefault(axis, size)
            if size != expected:
                problems.append(f"{name} has {axis} = {size}, expected {expected}")
    if "Hq" in known and "G" in known and (known["G"] == 0 or known["Hq"] % known["G"]):
        problems.append(f"{known['Hq']} query heads do not divide over {known['G']} kv heads")
    if len({t.device for t in tensors}) > 1:
        problems.append("all tensors must be on one device")
    return problems


def check_tensors(
    names: Sequence[str],
    tensors: Sequence[TensorOrMetadata],
    shapes: Sequence[Sequence[str | int]],
    packed: bool,
) -> None:
    """Check tensors with :func:`tensor_problems`.

    Raises:
        InvalidInput: At least one problem exists. The message lists the problems, and the name,
            shape, dtype and device of every tensor.
    """
    if problems := tensor_problems(names, tensors, shapes, packed):
        raise InvalidInput("; ".join(problems) + f" ({describe(names, tensors)})")


_Q, _K, _V = ("B", "S", "Hq", "Dk"), ("B", "S", "G", "Dk"), ("B", "S", "G", "Dv")
# of calls with first_query, in which keys have an axis of their own
_K_PART, _V_PART = ("B", "N", "G", "Dk"), ("B", "N", "G", "Dv")
_O, _LSE = ("B", "S", "Hq", "Dv"), ("B", "Hq", "S")
_K_CMP, _V_CMP = ("B", "C", "G", "Dk"), ("B", "C", "G", "Dv")
# slot -> its input tensors in order -> the symbols of their axes
SLOT_AXES: dict[str, dict[str, tuple[str | int, ...]]] = {
    "cmp": {"q": _Q, "k_cmp": _K_CMP, "v_cmp": _V_CMP},
    "select": {"q": _Q, "k_cmp": _K_CMP, "lse": _LSE},
    "sel": {"q": _Q, "k": _K, "v": _V, "blocks": ("B", "S", "G", "n")},
    "win": {"q": _Q, "k": _K, "v": _V},
    "combine": {"gates": ("B", "S", "Hq", 3), "o_cmp": _O, "o_sel": _O, "o_win": _O},
}
_PARTIAL_AXES = {
    slot: {name: {"k": _K_PART, "v": _V_PART}.get(name, axes) for name, axes in named.items()}
    for slot, named in SLOT_AXES.items()
}


def dtype_problems(
    named: Mapping[str, TensorOrMetadata], stats: Mapping[str, TensorOrMetadata]
) -> list[str]:
    """Return the dtypes that do not fit together; [] if all do. Nothing is cast silently.

    Args:
        named: Tensors that must share one floating dtype.
        stats: Gates and log-sum-exp, which must be float64 if ``named`` is float64, else float32.
    """
    dtypes = {t.dtype for t in named.values()}
    if len(dtypes) > 1:
        return [f"{', '.join(named)} must share one dtype"]
    dtype = dtypes.pop()
    if dtype not in _FLOATS:
        return [f"dtype must be bfloat16, float16, float32 or float64, got {dtype_name(dtype)}"]
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        f"{n} must be {dtype_name(expected)} beside {dtype_name(dtype)} inputs"
        for n, t in stats.items()
        if t.dtype != expected
    ]


def check_dtypes(named: dict[str, TensorOrMetadata], stats: dict[str, TensorOrMetadata]) -> None:
    """Check dtypes with :func:`dtype_problems`.

    Raises:
        InvalidInput: At least one problem exists. The message describes every tensor.
    """
    if problems := dtype_problems(named, stats):
        tensors = {**named, **stats}
        raise InvalidInput(
            "; ".join(problems) + f" ({describe(list(tensors), list(tensors.values()))})"
        )


def check_slot(
    slot: str,
    tensors: Sequence[TensorOrMetadata],
    cu_seqlens: TensorOrMetadata | None,
    geometry: BlockGeometry,
    first_query: int | None = None,
) -> None:
    """Check the inputs of a slot against the contract, by metadata only.

    Args:
        slot: The slot.
        tensors: Its inputs in order.
        cu_seqlens: Document bounds; None if dense.
        geometry: The block sizes.
        first_query: Position of row 0 of q, for queries that begin inside a sequence; None: whole
            sequences.

    Raises:
        InvalidInput: An axis count, size, dtype or device does not fit. The message describes every
            tensor.
    """
    names = tuple(SLOT_AXES[slot])
    named = dict(zip(names, tensors))
    axes = (SLOT_AXES if first_query is None else _PARTIAL_AXES)[slot]
    check_tensors(names, tensors, tuple(axes.values()), packed=cu_seqlens is not None)
    check_dtypes(
        {n: t for n, t in named.items() if n not in ("lse", "gates", "blocks")},
        {n: t for n, t in named.items() if n in ("lse", "gates")},
    )
    if slot == "sel" and named["blocks"].dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"blocks must be int32 or int64 ({describe(names, tensors)})")
    if slot != "combine":
        _check_key_rows(slot, named, cu_seqlens is not None, geometry, first_query)
    if cu_seqlens is not None and (
        cu_seqlens.dtype != torch.int32
        or cu_seqlens.dim() != 1
        or cu_seqlens.device != tensors[0].device
    ):
        raise InvalidInput(
            f"cu_seqlens must be int32 [documents + 1] on {tensors[0].device}, "
            f"got {dtype_name(cu_seqlens.dtype)} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )


def _check_key_rows(
    slot: str,
    named: Mapping[str, TensorOrMetadata],
    packed: bool,
    geometry: BlockGeometry,
    first_query: int | None,
) -> None:
    """Check the number of rows of k or k_cmp.

    Raises:
        InvalidInput: It does not fit the queries, or ``first_query`` is negative.
    """
    if first_query is not None and first_query < 0:
        raise InvalidInput(f"first_query must be >= 0, got {first_query}")
    length = named["q"].shape[-3] + (first_query or 0)
    if slot in ("sel", "win"):
        name, required, rows = "k", length, named["k"].shape[-3]
    else:
        count = geometry.max_compressed if packed else geometry.num_compressed
        name, required, rows = "k_cmp", count(length), named["k_cmp"].shape[-3]
    if rows < required or (first_query is None and rows != required):
        needed = "at least " * (first_query is not None) + str(required)
        raise InvalidInput(
            f"{name} must have {needed} rows for {length} tokens, got {rows}"
            f" ({describe(list(named), list(named.values()))})"
        )


def packed_total(
    slot: str,
    tensors: Sequence[torch.Tensor],
    geometry: BlockGeometry,
    first_query: int | None,
) -> int | range:
    """Return the number of rows of the packed axis, where the last boundary must be.

    It is a range in cmp and select if q holds only some rows.
    """
    rows: int = tensors[0].shape[0]
    if first_query is None or slot == "combine":
        return rows
    keys: int = tensors[1].shape[0]
    if slot in ("sel", "win"):
        return keys
    stride = geometry.compress_stride
    return range(max(keys * stride, first_query + rows), (keys + 1) * stride)


def is_tensor(x: object) -> bool:
    """Return whether ``x`` is a tensor but not a DTensor, whose shape is not that of its memory."""
    return isinstance(x, torch.Tensor) and type(x).__name__ != "DTensor"


def packing_problems(cu_seqlens: object, max_seqlen: object, device: torch.device) -> list[str]:
    """Return what is wrong with the packing arguments of a call, without reading boundary values.

    Args:
        cu_seqlens: The argument cu_seqlens of the call.
        max_seqlen: The argument max_seqlen of the call.
        device: Device of the packed tensors.
    """
    problems = []
    if max_seqlen is not None:
        # The second test accepts numpy integers and torch.SymInt.
        is_integer = isinstance(max_seqlen, int) or hasattr(max_seqlen, "__index__")
        not_a_count = isinstance(max_seqlen, (bool, torch.Tensor)) or not is_integer
        if not_a_count or cast(int, max_seqlen) < 0:
            text = describe_max_seqlen(max_seqlen)
            problems.append(f"max_seqlen must be a host integer >= 0, got {text}")
        elif beyond := too_large("max_seqlen", cast(int, max_seqlen)):
            problems += beyond
        elif cu_seqlens is None:
            problems.append("max_seqlen goes with cu_seqlens, which is None: pass both or neither")
    if cu_seqlens is None:
        return problems
    if not isinstance(cu_seqlens, torch.Tensor) or not is_tensor(cu_seqlens):
        problems.append(
            f"cu_seqlens must be an int32 tensor [documents + 1], got {type(cu_seqlens).__name__}"
            + boundaries_hint(cu_seqlens)
        )
    elif not is_strided(cu_seqlens):
        problems.append(cast(str, kind_problem("cu_seqlens", cu_seqlens)))
    elif cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        text = describe(["cu_seqlens"], [cu_seqlens])
        problems.append(
            f"cu_seqlens must be an int32 tensor [documents + 1], got {text}"
            + boundaries_hint(cu_seqlens)
        )
    elif cu_seqlens.device != device:
        problems.append(f"cu_seqlens must be on {device}, got {cu_seqlens.device}")
    elif cu_seqlens.shape[0] < 2:
        problems.append(
            "cu_seqlens must hold at least one document, [documents + 1], got"
            f" {list(cu_seqlens.shape)}"
        )
    return problems


def check_layer_input(
    x: torch.Tensor,
    dim: int,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None = None,
) -> None:
    """Check the arguments of a layer's forward, by metadata only.

    Args:
        x: Input of the layer, [B, S, dim] or packed [T, dim].
        dim: Model dimension of the layer.
        weight: Weight of the layer's projection, which has the layer's device and dtype.
        cu_seqlens: int32 [documents + 1] for packed documents, else None.
        max_seqlen: Length of the longest document, as a host integer.

    Raises:
        InvalidInput: An argument is wrong; the message names every wrong argument.
        Unsupported: x carries a tangent of forward-mode differentiation.
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidInput(f"x must be a tensor, got {type(x).__name__}")
    refuse_dual("NSAttention", (x,))
    problems = []
    check_kind("x", x)
    form = (
        "[T, dim] beside cu_seqlens"
        if cu_seqlens is not None
        else "[B, S, dim], or [T, dim] with cu_seqlens"
    )
    if x.dim() != (3 if cu_seqlens is None else 2) or x.shape[-1] != dim:
        looks = x.dim() == 3 and x.shape[1] == dim != x.shape[2] and cu_seqlens is None
        fix = ": it looks like [B, dim, S], pass x.transpose(1, 2)" * looks
        problems.append(f"x must be {form}, dim = {dim}; got {list(x.shape)}{fix}")
    if x.device != weight.device:
        problems.append(f"x is on {x.device}, the layer on {weight.device}: move one of them")
    if x.dtype != weight.dtype and not (autocast_enabled(x.device) and x.is_floating_point()):
        problems.append(
            f"x is {x.dtype}, the layer's parameters are {weight.dtype}: convert one of them, or"
            " use autocast"
        )
    if cu_seqlens is not None:
        check_packed_transforms(cu_seqlens, x)
    problems += packing_problems(cu_seqlens, max_seqlen, x.device)
    if problems:
        raise InvalidInput("; ".join(problems))


def check_cu_seqlens(
    cu_seqlens: torch.Tensor | None, total: int | range, max_seqlen: int | None = None
) -> None:
    """Check the values of packed boundaries.

    They must start at 0, must not decrease, and must end at ``total``. No document may be longer
    than ``max_seqlen``. The check runs only for boundaries on the CPU, because reading a GPU's
    values synchronises; NSA_CHECK=1 enables it for all devices.

    Args:
        cu_seqlens: int32 [documents + 1], or None if the call is not packed.
        total: Rows of the packed tensors, T, or the possible numbers of rows.
        max_seqlen: Declared length of the longest document; None: not declared.

    Raises:
        InvalidInput: The message names the wrong boundary, or the longest document's length.
    """
    if cu_seqlens is None or (
        cu_seqlens.device.type != "cpu" and os.environ.get("NSA_CHECK") != "1"
    ):
        return
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2:
        raise InvalidInput(f"cu_seqlens must hold at least one document, got {bounds}")
    if bounds[0] != 0:
        raise InvalidInput(f"cu_seqlens must start at 0, got {bounds[0]}")
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        if b < a:
            raise InvalidInput(f"cu_seqlens must not decrease, got {a} then {b} at index {i + 1}")
    totals = range(total, total + 1) if isinstance(total, int) else total
    if bounds[-1] not in totals:
        needed = f"{total}" if isinstance(total, int) else f"{total.start} to {total.stop - 1}"
        raise InvalidInput(f"cu_seqlens must end at the {needed} tokens given, got {bounds[-1]}")
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    if max_seqlen is not None and longest > max_seqlen:
        raise InvalidInput(
            f"max_seqlen must be at least the longest document's {longest} tokens, got {max_seqlen}"
        )


# (cu_seqlens, number of rows, max_seqlen) that the caller of the slots has already checked.
_checked: ContextVar[tuple[torch.Tensor, int, int] | None] = ContextVar("_checked", default=None)
_NO_CHANGE = contextlib.nullcontext()


def has_values(cu_seqlens: object) -> bool:
    """Return whether the boundaries have values; fake and traced tensors have none."""
    return type(cu_seqlens) is torch.Tensor and not torch.compiler.is_compiling()


def checked_boundaries(
    cu_seqlens: torch.Tensor | None, total: int, max_seqlen: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which slots do not check the values of ``cu_seqlens`` again.

    The caller must have run :func:`check_cu_seqlens` with the same arguments. A slot call with
    another tensor, number of rows or max_seqlen is still checked. The context has no effect if
    the boundaries have no values (:func:`has_values`).
    """
    if cu_seqlens is None or not has_values(cu_seqlens):
        return _NO_CHANGE
    return _marked(cu_seqlens, total, total if max_seqlen is None else max_seqlen)


@contextlib.contextmanager
def _marked(cu_seqlens: torch.Tensor, total: int, max_seqlen: int) -> Iterator[None]:
    token = _checked.set((cu_seqlens, total, max_seqlen))
    try:
        yield
    finally:
        _checked.reset(token)


def check_slot_boundaries(
    cu_seqlens: torch.Tensor | None, total: int | range, max_seqlen: int
) -> None:
    """Run :func:`check_cu_seqlens` for a slot, unless inside :func:`checked_boundaries`."""
    if cu_seqlens is None:
        return
    checked = _checked.get()
    if checked is None or checked[0] is not cu_seqlens or checked[1:] != (total, max_seqlen):
        check_cu_seqlens(cu_seqlens, total, max_seqlen)


def check_nonnegative(gates: torch.Tensor) -> None:
    """Check that no gate is negative, on the CPU, or with NSA_CHECK=1 on every device.

    Raises:
        InvalidInput: The message has the smallest gate.
    """
    if gates.device.type != "cpu" and os.environ.get("NSA_CHECK") != "1":
        return
    if not gates.numel() or not is_unobserved(gates):
        return
    smallest = gates.detach().min().item()
    if smallest < 0:
        raise InvalidInput(
            f"nonnegative_gates is True, but the smallest of gates is {smallest:.3g}; leave it out"
        )
