"""Checks of tensors against the shapes of the contract; metadata only, unless the values are on the
host anyway.
"""

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
from nsa_core.torch_ops.torch_state import autocasts


class Metadata(NamedTuple):
    """What the checks know of a tensor; hashable, so that a verdict can be remembered."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Metadata:
        """That of ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def dim(self) -> int:
        """Axes, as of a tensor."""
        return len(self.shape)


Described: TypeAlias = torch.Tensor | Metadata
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def describe(names: Sequence[str], tensors: Sequence[Described]) -> str:
    """Name, shape, dtype and device of each tensor, as error messages show them."""
    return ", ".join(
        f"{n} {list(t.shape)} {dtype_name(t.dtype)} {t.device}" for n, t in zip(names, tensors)
    )


def tensor_problems(
    names: Sequence[str],
    tensors: Sequence[Described],
    shapes: Sequence[Sequence[str | int]],
    packed: bool,
    sizes: Mapping[str, int] | None = None,
) -> list[str]:
    """What does not fit together among ``tensors``; empty: nothing.

    ``shapes`` gives a symbol or a number per axis of the [B, S, ...] form ("B", "S", "Hq", "G",
    "Dk", 3); equal symbols must have equal sizes, those of ``sizes`` the given ones, and ``packed``
    drops "B". "Hq" must be a multiple of "G".
    """
    wrong: list[str] = []
    known: dict[str, int] = dict(sizes or {})
    for name, tensor, axes in zip(names, tensors, shapes):
        axes = [a for a in axes if not (packed and a == "B")]
        if tensor.dim() != len(axes):
            wrong.append(f"{name} must have {len(axes)} axes {axes}, got {tensor.dim()}")
            continue
        for axis, size in zip(axes, tensor.shape):
            expected = axis if isinstance(axis, int) else known.setdefault(axis, size)
            if size != expected:
                wrong.append(f"{name} has {axis} = {size}, expected {expected}")
    if "Hq" in known and "G" in known and (known["G"] == 0 or known["Hq"] % known["G"]):
        wrong.append(f"{known['Hq']} query heads do not divide over {known['G']}")
    if len({t.device for t in tensors}) > 1:
        wrong.append("all tensors must be on one device")
    return wrong


def check_tensors(
    names: Sequence[str],
    tensors: Sequence[Described],
    shapes: Sequence[Sequence[str | int]],
    packed: bool,
) -> None:
    """Refuse tensors that :func:`tensor_problems` finds fault with.

    Raises:
        InvalidInput: all tensors' names, shapes, dtypes and devices, and what is wrong.
    """
    if wrong := tensor_problems(names, tensors, shapes, packed):
        raise InvalidInput("; ".join(wrong) + f" ({describe(names, tensors)})")


_Q, _K, _V = ("B", "S", "Hq", "Dk"), ("B", "S", "G", "Dk"), ("B", "S", "G", "Dv")
_O, _LSE = ("B", "S", "Hq", "Dv"), ("B", "Hq", "S")
_K_CMP, _V_CMP = ("B", "C", "G", "Dk"), ("B", "C", "G", "Dv")
# The tensors of each slot, in order, with their axes.
SLOT_AXES: dict[str, dict[str, tuple[str | int, ...]]] = {
    "cmp": {"q": _Q, "k_cmp": _K_CMP, "v_cmp": _V_CMP},
    "select": {"q": _Q, "k_cmp": _K_CMP, "lse": _LSE},
    "sel": {"q": _Q, "k": _K, "v": _V, "blocks": ("B", "S", "G", "n")},
    "win": {"q": _Q, "k": _K, "v": _V},
    "combine": {"gates": ("B", "S", "Hq", 3), "o_cmp": _O, "o_sel": _O, "o_win": _O},
}


def dtype_problems(named: Mapping[str, Described], stats: Mapping[str, Described]) -> list[str]:
    """``named`` share one floating dtype; ``stats`` (gates, LSE) are fp32, or fp64 beside fp64. No
    silent cast.
    """
    dtypes = {t.dtype for t in named.values()}
    if len(dtypes) > 1:
        return [f"{', '.join(named)} must share one dtype"]
    dtype = dtypes.pop()
    if dtype not in _FLOATS:
        return [f"dtype must be bfloat16, float16, float32 or float64, got {dtype_name(dtype)}"]
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        f"{n} must be {dtype_name(expected)} beside {dtype_name(dtype)}"
        for n, t in stats.items()
        if t.dtype != expected
    ]


def check_dtypes(named: dict[str, Described], stats: dict[str, Described]) -> None:
    """Refuse dtypes that :func:`dtype_problems` finds fault with.

    Raises:
        InvalidInput: with every tensor's dtype.
    """
    if wrong := dtype_problems(named, stats):
        everything = {**named, **stats}
        raise InvalidInput(
            "; ".join(wrong) + f" ({describe(list(everything), list(everything.values()))})"
        )


def check_slot(
    slot: str, tensors: Sequence[Described], cu_seqlens: Described | None, geometry: BlockGeometry
) -> None:
    """Refuse tensors a slot cannot take.

    Raises:
        InvalidInput: rank, size, dtype or device do not fit; all tensors are listed.
    """
    names = tuple(SLOT_AXES[slot])
    given = dict(zip(names, tensors))
    check_tensors(names, tensors, tuple(SLOT_AXES[slot].values()), packed=cu_seqlens is not None)
    check_dtypes(
        {n: t for n, t in given.items() if n not in ("lse", "gates", "blocks")},
        {n: t for n, t in given.items() if n in ("lse", "gates")},
    )
    if slot == "sel" and given["blocks"].dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"blocks must be int32 or int64 ({describe(names, tensors)})")
    if slot in ("cmp", "select"):
        length = given["q"].shape[-3]
        rows = (
            geometry.num_compressed(length)
            if cu_seqlens is None
            else geometry.max_compressed(length)
        )
        if given["k_cmp"].shape[-3] != rows:
            raise InvalidInput(
                f"k_cmp must have {rows} rows for {length} tokens ({describe(names, tensors)})"
            )
    if cu_seqlens is not None and (
        cu_seqlens.dtype != torch.int32
        or cu_seqlens.dim() != 1
        or cu_seqlens.device != tensors[0].device
    ):
        raise InvalidInput(
            f"cu_seqlens must be int32 [documents + 1] on {tensors[0].device}, "
            f"got {dtype_name(cu_seqlens.dtype)} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )


def is_tensor(x: object) -> bool:
    """Whether ``x`` is a tensor whose shape is that of its memory, which a DTensor's is not."""
    return isinstance(x, torch.Tensor) and type(x).__name__ != "DTensor"


def packing_problems(cu_seqlens: object, max_seqlen: object, device: torch.device) -> list[str]:
    """What is wrong with them beside rows on ``device``, as far as it shows without reading
    boundaries.
    """
    wrong = []
    if max_seqlen is not None:
        # numpy's integers, SymInt
        counts = isinstance(max_seqlen, int) or hasattr(max_seqlen, "__index__")
        if isinstance(max_seqlen, (bool, torch.Tensor)) or not counts or cast(int, max_seqlen) < 0:
            wrong.append(f"max_seqlen must be a host integer >= 0, got {max_seqlen!r}")
        elif cu_seqlens is None:
            wrong.append("max_seqlen goes with cu_seqlens, which is None")
    if cu_seqlens is None:
        return wrong
    if not isinstance(cu_seqlens, torch.Tensor) or not is_tensor(cu_seqlens):
        wrong.append(
            f"cu_seqlens must be an int32 tensor [documents + 1], got {type(cu_seqlens).__name__}"
        )
    elif cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        text = describe(["cu_seqlens"], [cu_seqlens])
        wrong.append(f"cu_seqlens must be an int32 tensor [documents + 1], got {text}")
    elif cu_seqlens.device != device:
        wrong.append(f"cu_seqlens must be on {device}, got {cu_seqlens.device}")
    elif cu_seqlens.shape[0] < 2:
        wrong.append(
            "cu_seqlens must hold at least one document, [documents + 1], got"
            f" {list(cu_seqlens.shape)}"
        )
    return wrong


def check_layer_input(
    x: torch.Tensor,
    dim: int,
    weight: torch.Tensor,  # of the layer's projection, by which its device and dtype are known
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None = None,
    mask: object = None,
    *others: object,  # context, key_value_states
) -> None:
    """Refuse what a layer cannot take; metadata only.

    Raises:
        InvalidInput: all that is wrong, by name.
    """
    wrong = []
    if mask is not None:
        wrong.append(
            "attention_mask is not supported: NSA is causal, and padding is left out, not masked:"
            " rows, cu_seqlens, longest, indices = nsa_core.unpad(x, attention_mask), pass rows and"
            " cu_seqlens=, and nsa_core.pad brings the result back"
        )
    for name, other in zip(("context", "key_value_states"), others):
        if other is not None:
            wrong.append(f"{name}: NSA is self-attention only, it has no cross-attention")
    if not isinstance(x, torch.Tensor):
        raise InvalidInput("; ".join([*wrong, f"x must be a tensor, got {type(x).__name__}"]))
    form = (
        "[T, dim] beside cu_seqlens"
        if cu_seqlens is not None
        else "[B, S, dim], or [T, dim] with cu_seqlens"
    )
    if x.dim() != (3 if cu_seqlens is None else 2) or x.shape[-1] != dim:
        wrong.append(f"x must be {form}, dim = {dim}; got {list(x.shape)}")
    if x.device != weight.device:
        wrong.append(f"x is on {x.device}, the layer on {weight.device}")
    if x.dtype != weight.dtype and not (autocasts(x.device) and x.is_floating_point()):
        wrong.append(
            f"x is {x.dtype}, the layer's parameters are {weight.dtype}: convert one, or use"
            " autocast"
        )
    wrong += packing_problems(cu_seqlens, max_seqlen, x.device)
    if wrong:
        raise InvalidInput("; ".join(wrong))


def check_cu_seqlens(
    cu_seqlens: torch.Tensor | None, total: int, max_seqlen: int | None = None
) -> None:
    """Refuse boundaries that do not start at 0, decrease, do not end at ``total`` tokens, or exceed
    ``max_seqlen``.

    Reads the values only where that costs no synchronisation: on the CPU, or with NSA_CHECK=1.

    Raises:
        InvalidInput: naming the boundary at fault, or the longest document's length.
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
    if bounds[-1] != total:
        raise InvalidInput(f"cu_seqlens must end at the {total} tokens given, got {bounds[-1]}")
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    if max_seqlen is not None and longest > max_seqlen:
        raise InvalidInput(
            f"max_seqlen must be at least the longest document's {longest} tokens, got {max_seqlen}"
        )


# The boundaries, number of rows and max_seqlen that a caller of slots has checked.
_checked: ContextVar[tuple[torch.Tensor, int, int] | None] = ContextVar("_checked", default=None)
_UNCHANGED = contextlib.nullcontext()


def has_values(cu_seqlens: object) -> bool:
    """Whether the boundaries can be read: a fake tensor, and one that torch.compile traces, has no
    values.
    """
    return type(cu_seqlens) is torch.Tensor and not torch.compiler.is_compiling()


def checked_boundaries(
    cu_seqlens: torch.Tensor | None, total: int, max_seqlen: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """A block in which slots do not check the values of ``cu_seqlens`` again; the caller has run
    :func:`check_cu_seqlens` with the same arguments.

    Without effect where the boundaries have no values (:func:`has_values`). A slot that is given
    another tensor, number of rows or max_seqlen checks them as ever.
    """
    if cu_seqlens is None or not has_values(cu_seqlens):
        return _UNCHANGED
    return _marked(cu_seqlens, total, total if max_seqlen is None else max_seqlen)


@contextlib.contextmanager
def _marked(cu_seqlens: torch.Tensor, total: int, max_seqlen: int) -> Iterator[None]:
    token = _checked.set((cu_seqlens, total, max_seqlen))
    try:
        yield
    finally:
        _checked.reset(token)


def check_slot_boundaries(cu_seqlens: torch.Tensor | None, total: int, max_seqlen: int) -> None:
    """:func:`check_cu_seqlens` for a slot, unless its caller has run it; see
    :func:`checked_boundaries`.
    """
    if cu_seqlens is None:
        return
    checked = _checked.get()
    if checked is None or checked[0] is not cu_seqlens or checked[1:] != (total, max_seqlen):
        check_cu_seqlens(cu_seqlens, total, max_seqlen)
