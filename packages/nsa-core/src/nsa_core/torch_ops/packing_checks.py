"""Check the packing arguments of a call: metadata always, values only if they are on the host."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch

from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.layout import BlockGeometry
from nsa_core.limits import shown, too_large
from nsa_core.torch_ops.tensor_kinds import is_strided, is_tensor, kind_problem
from nsa_core.torch_ops.torch_state import checks_values, is_exporting
from nsa_core.torch_ops.vmap_rule import PACKED_UNDER_VMAP, is_mapped


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
            actual = shown(max_seqlen)
            if isinstance(max_seqlen, torch.Tensor):
                actual = (
                    "a tensor: pass int(max_seqlen), computed once per batch, because reading it"
                    " from a GPU synchronises"
                )
            problems.append(f"max_seqlen must be a host integer >= 0, got {actual}")
        elif beyond := too_large("max_seqlen", cast(int, max_seqlen)):
            problems += beyond
        elif cu_seqlens is None:
            problems.append("max_seqlen goes with cu_seqlens, which is None: pass both or neither")
    if cu_seqlens is None:
        return problems
    if not isinstance(cu_seqlens, torch.Tensor) or not is_tensor(cu_seqlens):
        problems.append(
            f"cu_seqlens must be an int32 tensor [documents + 1], got {type(cu_seqlens).__name__}"
            + _conversion(cu_seqlens)
        )
    elif not is_strided(cu_seqlens):
        problems.append(cast(str, kind_problem("cu_seqlens", cu_seqlens)))
    elif cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        actual = f"{list(cu_seqlens.shape)} {dtype_name(cu_seqlens.dtype)} {cu_seqlens.device}"
        problems.append(
            f"cu_seqlens must be an int32 tensor [documents + 1], got cu_seqlens {actual}"
            + _conversion(cu_seqlens)
        )
    elif cu_seqlens.device != device:
        problems.append(f"cu_seqlens must be on {device}, got {cu_seqlens.device}")
    elif cu_seqlens.shape[0] < 2:
        problems.append(
            "cu_seqlens must hold at least one document, [documents + 1], got"
            f" {list(cu_seqlens.shape)}"
        )
    return problems


def _conversion(cu_seqlens: object) -> str:
    """Return ": pass ..." with the conversion of cu_seqlens to int32 [documents + 1], or ""."""
    if isinstance(cu_seqlens, torch.Tensor):
        is_integer = not (cu_seqlens.is_floating_point() or cu_seqlens.is_complex())
        if cu_seqlens.dim() == 1 and is_integer and cu_seqlens.dtype is not torch.bool:
            return ": pass cu_seqlens.int()"
        return ""
    if isinstance(cu_seqlens, (list, tuple)) or type(cu_seqlens).__name__ == "ndarray":
        return ": pass torch.tensor(cu_seqlens, dtype=torch.int32, device=...), made once per batch"
    return ""


def check_packed_transforms(cu_seqlens: Any, *tensors: torch.Tensor) -> None:
    """Check that a packed call is neither mapped by vmap nor exported with dynamic sizes.

    Raises:
        Unsupported: It is; the message names the alternatives.
    """
    if torch._C._are_functorch_transforms_active() and any(map(is_mapped, (cu_seqlens, *tensors))):
        raise Unsupported(PACKED_UNDER_VMAP)
    if is_exporting() and isinstance(cu_seqlens, torch.Tensor):
        sizes = (tensors[0].shape[0], *cu_seqlens.shape)
        if not all(isinstance(size, int) for size in sizes):
            raise Unsupported(
                "packed documents (cu_seqlens) cannot be exported with a dynamic number of rows or"
                " documents: export the call on [B, S, ...] without cu_seqlens, or use"
                " torch.compile"
            )


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
    if cu_seqlens is None or not checks_values(cu_seqlens):
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
