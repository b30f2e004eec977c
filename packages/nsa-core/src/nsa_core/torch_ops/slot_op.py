"""Slot operators: wrap a backend's functions as torch operators with schema, autograd and checks.

Each (backend, slot) has a pair of operators, ``nsa_<backend>::<slot>`` and ``..._backward``, so
that torch.compile, CUDA graphs, checkpointing and the profiler treat all backends alike. The
operators check inputs and outputs, so that backends need not.

The values of packed boundaries are checked once per call. nsa_attention checks them if it can read
them. Otherwise (in a compiled graph, or if a slot is called on its own) each slot checks them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from nsa_core.contract import SlotCall, SlotSpec
from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput, NSAError, Unsupported
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops import autograd
from nsa_core.torch_ops.call_wrapper import call_function, import_function
from nsa_core.torch_ops.tensor_checks import (
    SLOT_AXES,
    Metadata,
    TensorOrMetadata,
    check_slot,
    check_slot_boundaries,
    packed_total,
)
from nsa_core.torch_ops.torch_state import backend_state
from nsa_core.torch_ops.vmap_rule import TAIL_LENGTH, folding_rule
from nsa_core.util.planning_lock import planning_lock
from nsa_core.util.text import describe_error

INPUTS = {slot: tuple(axes) for slot, axes in SLOT_AXES.items()}
DIFFERENTIABLE = {
    slot: tuple(n for n in names if n not in ("blocks", "lse")) for slot, names in INPUTS.items()
}
DIFFERENTIABLE["select"] = ()  # the selected block indices have no gradient
TAIL = (
    "Tensor? cu_seqlens, SymInt max_seqlen, float scale, int[] geometry, bool deterministic,"
    " SymInt? first_query"
)

Shape = tuple[Any, ...]
TensorSpec = tuple[Shape, torch.dtype]


def output_specs(
    slot: str, tensors: Sequence[TensorOrMetadata], n_selected: int
) -> list[TensorSpec]:
    """Return the (shape, dtype) of each output of ``slot`` for the inputs ``tensors``."""
    if slot == "combine":
        return [(tuple(tensors[1].shape), tensors[1].dtype)]
    q = tensors[0]
    *lead, heads, _ = q.shape
    if slot == "select":
        return [((*lead, tensors[1].shape[-2], n_selected), torch.int32)]
    lse = (*lead[:-1], heads, lead[-1])
    return [((*lead, heads, tensors[2].shape[-1]), q.dtype), (lse, stats_dtype(q.dtype))]


@dataclasses.dataclass(frozen=True)
class DispatchRecord:
    """One call of a backend's function; ``direction`` is forward, backward or decode."""

    backend: str
    slot: str
    direction: str


_traces: list[list[DispatchRecord]] = []


@contextlib.contextmanager
def record_dispatch() -> Iterator[list[DispatchRecord]]:
    """Record every backend call inside the block, from any thread, in order."""
    trace: list[DispatchRecord] = []
    _traces.append(trace)
    try:
        yield trace
    finally:
        _traces[:] = [t for t in _traces if t is not trace]


class BackendCall:
    """Context of a call of a backend's function.

    It records the call, makes the device current, turns autocast off, and converts exceptions. The
    class takes half the host time of a function with @contextmanager.

    Raises:
        NSAError: The function raised. NSAError and torch.OutOfMemoryError pass unchanged.
    """

    def __init__(self, backend: str, slot: str, direction: str, device: torch.device) -> None:
        self._call, self._state = (backend, slot, direction), backend_state(device)

    def __enter__(self) -> None:
        for trace in _traces:
            trace.append(DispatchRecord(*self._call))
        self._state.__enter__()

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state.__exit__(type(error) if error else None, error, traceback)
        if (
            error is None
            or isinstance(error, (NSAError, torch.OutOfMemoryError))
            or not isinstance(error, Exception)
        ):
            return
        backend, slot, direction = self._call
        where = f"backend {backend!r}, slot {slot!r}, {direction}"
        raise NSAError(f"{where}: {describe_error(error)}") from error


def in_layout(tensors: Iterable[torch.Tensor], blocks: int | None = None) -> list[torch.Tensor]:
    """Return ``tensors`` with the strides that the contract promises: stride(-1) == 1.

    Args:
        tensors: The tensors of a call.
        blocks: Position of the block indices, which become contiguous; None: there are none.
    """
    # Most tensors are contiguous, and this test takes a quarter of the time of stride(-1).
    arranged = [t if t.is_contiguous() or t.stride(-1) == 1 else t.contiguous() for t in tensors]
    if blocks is not None:
        arranged[blocks] = arranged[blocks].contiguous()
    return arranged


def checked_results(
    backend: str,
    slot: str,
    direction: str,
    results: Any,
    specs: Sequence[TensorSpec],
    device: torch.device,
) -> list[torch.Tensor]:
    """Return a backend's results as contiguous tensors.

    Raises:
        NSAError: Their number, shapes, dtypes or devices differ from ``specs`` and ``device``.
    """
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    contiguous = []
    for result, (shape, dtype) in zip(results, specs):
        if result.shape != shape or result.dtype != dtype or result.device != device:
            break
        contiguous.append(result.contiguous())
    if len(contiguous) == len(results) == len(specs):
        return contiguous
    problems = []
    if len(results) != len(specs):
        problems.append(f"{len(results)} tensors, expected {len(specs)}")
    for index, (result, (shape, dtype)) in enumerate(zip(results, specs)):
        if result.shape != shape or result.dtype != dtype or result.device != device:
            actual = f"{tuple(result.shape)} {result.dtype} on {result.device}"
            problems.append(
                f"result {index} is {actual}, expected {tuple(shape)} {dtype} on {device}"
            )
    raise NSAError(
        f"backend {backend!r}, slot {slot!r}, {direction} returned " + "; ".join(problems)
    )


class _CheckedCall(NamedTuple):
    """The results of the checks of a call, which follow from its metadata.

    Attributes:
        specs: The shape and dtype of each output.
        call: The arguments besides the tensors; None for packed calls, whose boundaries differ.
        is_empty: Whether the call computes nothing.
    """

    specs: list[TensorSpec]
    call: SlotCall | None
    is_empty: bool


@functools.lru_cache(maxsize=4096)
def _checked_call(
    slot: str,
    inputs: tuple[tuple[Any, ...], ...],
    cu: Metadata | None,
    max_seqlen: int | None,
    scale: float,
    geometry: tuple[int, ...],
    deterministic: bool,
    first_query: int | None,
) -> _CheckedCall:
    """Check the inputs of ``slot``, given as fields of Metadata.

    The cache skips the checks for calls with inputs of the same metadata.

    Raises:
        InvalidInput: As check_slot.
    """
    tensors, sizes = [Metadata(*fields) for fields in inputs], BlockGeometry.from_ints(geometry)
    check_slot(slot, tensors, cu, sizes, first_query)
    specs = output_specs(slot, tensors, sizes.num_selected_blocks)
    is_empty = _is_empty(slot, tensors)
    if cu is not None:
        return _CheckedCall(specs, None, is_empty)
    call = slot_call((None, max_seqlen, scale, geometry, deterministic, first_query))
    return _CheckedCall(specs, call, is_empty)


def _is_empty(slot: str, tensors: Sequence[TensorOrMetadata]) -> bool:
    """Return whether the call computes nothing: no queries, no compressed tokens, or n = 0."""
    no_keys = (slot == "cmp" and tensors[1].shape[-3] == 0) or (
        slot == "sel" and tensors[3].shape[-1] == 0
    )
    return 0 in tensors[0].shape or no_keys


class SlotOp:
    """The forward and backward operators of one backend's slot.

    Attributes:
        op: The overload of the forward operator. Its arguments are the slot's tensors, then
            cu_seqlens, max_seqlen, scale, geometry, deterministic and first_query, which is None
            for calls with whole sequences.
        direct: A function equivalent to ``op``, for calls that are autograd.is_unobserved().
    """

    def __init__(self, backend: str, slot: str, spec: SlotSpec, name: str) -> None:
        self.backend, self.slot, self.spec = backend, slot, spec
        self._forward: Callable[..., Any] = import_function(backend, spec.forward)
        self._backward: Callable[..., Any] | None = (
            import_function(backend, spec.backward) if spec.backward else None
        )
        self._n_inputs = len(INPUTS[slot])
        self._blocks = INPUTS[slot].index("blocks") if slot == "sel" else None
        self._grads = [INPUTS[slot].index(name) for name in DIFFERENTIABLE[slot]]
        self._n_out = 1 if slot in ("select", "combine") else 2
        namespace, short = name.split("::")
        # A FRAGMENT, because several slots and plans define operators in one namespace.
        self._lib = torch.library.Library(namespace, "FRAGMENT")
        self._define(
            short,
            self.forward,
            self._forward_fake,
            [f"Tensor {i}" for i in INPUTS[slot]],
            self._n_out,
        )
        self.op = getattr(getattr(torch.ops, namespace), short).default
        if not self._grads:
            direct = autograd.register_constant(self._lib, short, self.op, self.forward)
        else:
            saved = [f"Tensor {i}" for i in INPUTS[slot]] + (
                ["Tensor o", "Tensor lse"] if self._n_out == 2 else []
            )
            self._define(
                f"{short}_backward",
                self._backward_impl,
                self._backward_fake,
                ["Tensor grad", *saved],
                len(self._grads),
            )
            self.backward_op = getattr(getattr(torch.ops, namespace), f"{short}_backward").default
            direct = autograd.register(
                self._lib, short, self.op, self.forward, self._setup_context, self._autograd
            )
            autograd.register_backward(
                self._lib,
                f"{short}_backward",
                self.backward_op,
                self._backward_impl,
                f"backend {backend!r}, slot {slot!r}",
            )
        self.direct: Callable[..., Any] = direct
        _operators[self.op] = self

    @property
    def has_backward(self) -> bool:
        """Whether the backend has a backward for the slot."""
        return self._backward is not None

    def gradients(self, direct: bool) -> Callable[..., Any]:
        """Return the backward: its operator, or with ``direct`` its function alone."""
        return self._backward_impl if direct else self.backward_op

    def _define(
        self,
        short: str,
        impl: Callable[..., Any],
        fake: Callable[..., Any],
        tensors: list[str],
        outputs: int,
    ) -> None:
        """Define the operator ``short`` with its implementation and its shape inference."""
        result = "Tensor" if outputs == 1 else "(" + ", ".join(["Tensor"] * outputs) + ")"
        self._lib.define(
            f"{short}({', '.join(tensors)}, {TAIL}) -> {result}",
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        self._lib.impl(short, impl, "CompositeExplicitAutograd")
        name = f"{self._lib.ns}::{short}"
        torch.library.register_fake(name, fake, lib=self._lib)
        op = getattr(getattr(torch.ops, self._lib.ns), short).default
        torch.library.register_vmap(name, folding_rule(op), lib=self._lib)

    def forward(self, *args: Any) -> Any:
        """Check the inputs, call the backend's forward, and check its results.

        It runs without autograd and without the dispatcher. The arguments are those of ``op``.
        """
        tensors = in_layout(args[: self._n_inputs], self._blocks)
        cu, max_seqlen, scale, geometry, deterministic, first_query = args[self._n_inputs :]
        metadata = tuple([(t.shape, t.dtype, t.device) for t in tensors])
        constants = scale, tuple(geometry), deterministic, first_query
        if cu is None:
            specs, call, is_empty = _checked_call(self.slot, metadata, None, max_seqlen, *constants)
        else:
            checked = _checked_call(self.slot, metadata, Metadata.of(cu), None, *constants)
            specs, call, is_empty = checked._replace(call=slot_call(args[self._n_inputs :]))
        assert call is not None
        if cu is not None:
            total = packed_total(self.slot, tensors, call.geometry, first_query)
            check_slot_boundaries(cu, total, max_seqlen)
        where, device = (self.backend, self.slot, "forward"), tensors[0].device
        if is_empty:
            outs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in specs]
            if self._n_out == 2:
                outs[1].fill_(-torch.inf)
        else:
            with BackendCall(*where, device):
                results = call_function(where, self._forward, tensors, call=call)
                outs = checked_results(*where, results, specs, device)
        return outs[0] if self._n_out == 1 else tuple(outs)

    def _forward_fake(self, *args: Any) -> Any:
        """Return empty tensors with the shapes and dtypes of the forward's results."""
        tensors = args[: self._n_inputs]
        geometry = BlockGeometry.from_ints(args[self._n_inputs + 3])
        check_slot(self.slot, tensors, args[self._n_inputs], geometry, args[-1])
        specs = output_specs(self.slot, tensors, geometry.num_selected_blocks)
        outs = [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in specs]
        return outs[0] if self._n_out == 1 else tuple(outs)

    def _backward_impl(self, *args: Any) -> Any:
        """Call the backend's backward, and check its results."""
        grad, saved = args[0], args[1:-TAIL_LENGTH]
        call = slot_call(args[-TAIL_LENGTH:])
        inputs = saved[: self._n_inputs]
        specs, device = [(inputs[i].shape, inputs[i].dtype) for i in self._grads], inputs[0].device
        assert self._backward is not None  # _setup_context refuses a forward-only slot
        if _is_empty(self.slot, inputs):
            outs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in specs]
        else:
            tensors = in_layout((grad, *saved), self._blocks and 1 + self._blocks)
            with BackendCall(self.backend, self.slot, "backward", device):
                outs = checked_results(
                    self.backend,
                    self.slot,
                    "backward",
                    call_function(
                        (self.backend, self.slot, "backward"), self._backward, tensors, call=call
                    ),
                    specs,
                    device,
                )
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _backward_fake(self, *args: Any) -> Any:
        """Return empty tensors with the shapes and dtypes of the backward's results."""
        outs = [args[1 + i].new_empty(args[1 + i].shape) for i in self._grads]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the inputs and results of the forward for the backward.

        Raises:
            Unsupported: The backend has no backward for this slot.
        """
        if self._backward is None:
            raise Unsupported(
                f"backend {self.backend!r} has no backward for {self.slot!r}; plan with"
                " needs_grad=True"
            )
        outs = output if self._n_out == 2 else ()
        if self._n_out == 2:
            ctx.mark_non_differentiable(output[1])
        # Without this, every backward would fill an unused gradient of the log-sum-exp.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: self._n_inputs], *outs, inputs[self._n_inputs])
        ctx.tail = inputs[self._n_inputs + 1 :]

    def _autograd(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the gradient of each argument of the forward operator, None if it has none."""
        *saved, cu_seqlens = ctx.saved_tensors
        input_grads: list[Any] = [None] * (self._n_inputs + TAIL_LENGTH)
        if grads[0] is None:
            return tuple(input_grads)
        direct = not torch.is_grad_enabled() and autograd.is_unobserved(
            grads[0], *saved, cu_seqlens
        )
        with autograd.backward_context():
            results = (self._backward_impl if direct else self.backward_op)(
                grads[0], *saved, cu_seqlens, *ctx.tail
            )
        for index, result in zip(self._grads, results):
            input_grads[index] = result
        return tuple(input_grads)


def slot_call(tail: Sequence[Any]) -> SlotCall:
    """Return the arguments TAIL of an operator as backends take them.

    Every call of a backend passes here, inside the operator: a graph that was captured or exported
    with contiguous boundaries may run with others, and replays may find new values in them.
    """
    cu_seqlens, max_seqlen, scale, geometry, deterministic, first_query = tail
    return SlotCall(
        BlockGeometry.from_ints(geometry),
        scale,
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        max_seqlen,
        deterministic,
        first_query or 0,
    )


_operators: dict[Any, SlotOp] = {}  # by the overload of the forward operator
_ops: dict[tuple[str, str], list[SlotOp]] = {}


def operator_of(op: Any) -> SlotOp:
    """Return the operator pair whose forward overload is ``op``."""
    return _operators[op]


def slot_of(op: Any) -> str | None:
    """Return the slot whose forward overload is ``op``; None for other operators."""
    return _operators[op].slot if op in _operators else None


def slot_op(backend: str, slot: str, spec: SlotSpec) -> SlotOp:
    """Return the operator of a backend's slot, defined once per process and spec.

    Raises:
        ImportError, AttributeError: A function that ``spec`` names cannot be imported.
    """
    with planning_lock:
        ops = _ops.setdefault((backend, slot), [])
        for op in ops:
            if op.spec == spec:
                return op
        name = f"nsa_{re.sub(r'[^0-9a-zA-Z_]', '_', backend)}::{slot}" + (
            f"_{len(ops) + 1}" if ops else ""
        )
        ops.append(SlotOp(backend, slot, spec, name))
        return ops[-1]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel of a slot in a plan: a backend's operator with the layer's constants bound.

    Attributes:
        backend: Name of the backend.
        slot: The slot.
        op: The overload of its forward operator.
        scale: Softmax scale.
        geometry: The block sizes, as BlockGeometry.as_ints() gives them.
        deterministic: Whether every run must give the same bits.
        partial: Whether calls may pass ``first_query``.
        causal: Of sel: a kernel of causal attention, for sequences of at most n * l' tokens. It is
            the kernel of win of the same backend with a window of n * l' tokens. None: the backend
            has none, or refuses the window.
    """

    backend: str
    slot: str
    op: Any
    scale: float
    geometry: tuple[int, ...]
    deterministic: bool
    partial: bool = False
    causal: Kernel | None = None

    def __call__(
        self,
        *tensors: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        first_query: int | None = None,
    ) -> Any:
        """Run the slot.

        Args:
            *tensors: Its inputs in order; :mod:`nsa_core.contract` gives their shapes.
            cu_seqlens: int32 [documents + 1], first token of each document, for packed calls.
            max_seqlen: Length of the longest sequence, or an upper bound; None: the tokens of the
                given keys.
            first_query: Position of row 0 of q, for queries that begin inside a sequence; None: q
                holds whole sequences.

        Raises:
            InvalidInput: Shapes, dtypes or devices do not fit together, or ``first_query`` is given
                although the plan is not partial.
            NSAError: The backend raised or returned a wrong result; the message names it.
        """
        if first_query is not None and not self.partial:
            raise InvalidInput(
                f"first_query is {first_query}, but the plan is for whole sequences: resolve it"
                " with partial=True"
            )
        if max_seqlen is None:
            max_seqlen = self._longest(tensors, cu_seqlens is not None, first_query)
        if autograd.is_unobserved(*tensors, cu_seqlens) and type(max_seqlen) is int:
            return _operators[self.op].direct(
                *tensors, cu_seqlens, *self.tail(max_seqlen, first_query)
            )
        return self.op(
            *tensors,
            cu_seqlens,
            max_seqlen,
            self.scale,
            list(self.geometry),
            self.deterministic,
            first_query,
        )

    def direct(self) -> Callable[..., Any]:
        """Return a function that runs the slot below autograd.

        It takes the tensors, and the keywords cu_seqlens and max_seqlen; for calls that are
        autograd.is_unobserved().
        """
        forward, constants = _operators[self.op].forward, self.tail(0)[1:]

        def run(*tensors: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int) -> Any:
            return forward(*tensors, cu_seqlens, max_seqlen, *constants)

        return run

    def tail(self, max_seqlen: int, first_query: int | None = None) -> tuple[Any, ...]:
        """Return the arguments of the operator after cu_seqlens, for a call without dispatcher."""
        return (max_seqlen, self.scale, self.geometry, self.deterministic, first_query)

    def _longest(
        self, tensors: Sequence[torch.Tensor], packed: bool, first_query: int | None
    ) -> int:
        """Return an upper bound of the length of a sequence, from the shapes."""
        if not packed:
            return tensors[0].shape[1] + (first_query or 0)
        geometry = BlockGeometry.from_ints(self.geometry)
        total = packed_total(self.slot, tensors, geometry, first_query)
        return total.stop - 1 if isinstance(total, range) else total
