"""Slot operators: wrap a backend's functions as torch operators with schema, autograd and checks.

Each (backend, slot) has a pair of operators, ``nsa_<backend>::<slot>`` and ``..._backward``, so
that torch.compile, CUDA graphs, checkpointing and the profiler treat all backends alike. The
operators check inputs and outputs, so that backends need not.

The values of packed boundaries are checked once per call. nsa_attention checks them if it can read
them. Otherwise (in a compiled graph, or if a slot is called on its own) each slot checks them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nsa_core.contract import SlotCall, SlotSpec
from nsa_core.errors import Unsupported
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops import autograd
from nsa_core.torch_ops.backend_call import TensorSpec, in_layout, run_backend
from nsa_core.torch_ops.call_wrapper import import_function
from nsa_core.torch_ops.packing_checks import check_slot_boundaries, packed_total
from nsa_core.torch_ops.schema import (
    DIFFERENTIABLE,
    INPUTS,
    TAIL,
    Tail,
    define,
    is_empty,
    operator_namespace,
    output_specs,
    results_schema,
    tensors_schema,
)
from nsa_core.torch_ops.tensor_checks import Metadata, check_slot
from nsa_core.torch_ops.vmap_rule import TAIL_LENGTH, folding_rule
from nsa_core.util.planning_lock import planning_lock


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
    empty = is_empty(slot, tensors)
    if cu is not None:
        return _CheckedCall(specs, None, empty)
    tail = Tail(None, max_seqlen or 0, scale, geometry, deterministic, first_query)
    return _CheckedCall(specs, tail.call(), empty)


class SlotOp:
    """The forward and backward operators of one backend's slot.

    Attributes:
        op: The overload of the forward operator. Its arguments are the slot's tensors, then
            cu_seqlens, max_seqlen, scale, geometry, deterministic and first_query, which is None
            for calls with whole sequences.
        direct: A function equivalent to ``op``, for calls that are autograd.is_unobserved().
    """

    def __init__(self, backend: str, slot: str, spec: SlotSpec, short: str) -> None:
        self.backend, self.slot, self.spec = backend, slot, spec
        self._forward: Callable[..., Any] = import_function(backend, spec.forward)
        self._backward: Callable[..., Any] | None = (
            import_function(backend, spec.backward) if spec.backward else None
        )
        self._n_inputs = len(INPUTS[slot])
        self._blocks = INPUTS[slot].index("blocks") if slot == "sel" else None
        self._grads = [INPUTS[slot].index(name) for name in DIFFERENTIABLE[slot]]
        self._n_out = 1 if slot in ("select", "combine") else 2
        # A FRAGMENT, because several slots and plans define operators in one namespace.
        self._lib = torch.library.Library(operator_namespace(backend), "FRAGMENT")
        inputs = tensors_schema(INPUTS[slot])
        self.op = self._define(short, inputs, self._n_out, self.forward, self._forward_fake)
        if not self._grads:
            self.direct: Callable[..., Any] = autograd.register_constant(
                self._lib, short, self.op, self.forward
            )
        else:
            saved = ("grad", *INPUTS[slot], *(("o", "lse") if self._n_out == 2 else ()))
            self.backward_op = self._define(
                f"{short}_backward",
                tensors_schema(saved),
                len(self._grads),
                self._backward_impl,
                self._backward_fake,
            )
            self.direct = autograd.register(
                self._lib, short, self.op, self.forward, self._setup_context, self._autograd
            )
            autograd.register_backward(
                self._lib,
                f"{short}_backward",
                self.backward_op,
                self._backward_impl,
                f"backend {backend!r}, slot {slot!r}",
            )
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
        tensors: str,
        results: int,
        function: Callable[..., Any],
        fake: Callable[..., Any],
    ) -> Any:
        """Define the operator ``short``, which torch.func.vmap can map; return its overload."""
        schema = f"{short}({tensors}, {TAIL}) -> {results_schema(results)}"
        op = define(self._lib, schema, function, fake)
        torch.library.register_vmap(op.name(), folding_rule(op), lib=self._lib)
        return op

    def forward(self, *args: Any) -> Any:
        """Check the inputs, call the backend's forward, and check its results.

        It runs without autograd and without the dispatcher. The arguments are those of ``op``.
        """
        tensors = in_layout(args[: self._n_inputs], self._blocks)
        tail = Tail(*args[self._n_inputs :])
        cu, max_seqlen, scale, geometry, deterministic, first_query = tail
        metadata = tuple([(t.shape, t.dtype, t.device) for t in tensors])
        constants = scale, tuple(geometry), deterministic, first_query
        if cu is None:
            specs, call, empty = _checked_call(self.slot, metadata, None, max_seqlen, *constants)
        else:
            checked = _checked_call(self.slot, metadata, Metadata.of(cu), None, *constants)
            specs, empty = checked.specs, checked.is_empty
            call = tail.call()
            total = packed_total(self.slot, tensors, call.geometry, first_query)
            check_slot_boundaries(cu, total, max_seqlen)
        device = tensors[0].device
        if empty:
            outs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in specs]
            if self._n_out == 2:
                outs[1].fill_(-torch.inf)
        else:
            where = self.backend, self.slot, "forward"
            outs = run_backend(where, self._forward, tensors, specs, device, {"call": call})
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
        grad, saved, tail = args[0], args[1:-TAIL_LENGTH], Tail(*args[-TAIL_LENGTH:])
        inputs = saved[: self._n_inputs]
        specs, device = [(inputs[i].shape, inputs[i].dtype) for i in self._grads], inputs[0].device
        assert self._backward is not None  # _setup_context refuses a forward-only slot
        if is_empty(self.slot, inputs):
            outs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in specs]
        else:
            tensors = in_layout((grad, *saved), self._blocks and 1 + self._blocks)
            where = self.backend, self.slot, "backward"
            options = {"call": tail.call()}
            outs = run_backend(where, self._backward, tensors, specs, device, options)
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
        number = f"_{len(ops) + 1}" if ops else ""
        ops.append(SlotOp(backend, slot, spec, f"{slot}{number}"))
        return ops[-1]
