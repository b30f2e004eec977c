"""The fused backward of the core, ``nsa_<backend>::core_backward``: one operator for five slots.

A backend that has it (``BackendSpec.fused``, "backward") computes all gradients of the core at
once. The node of the core (:mod:`nsa_core.torch_ops.core_node`) calls it if no gate is negative and
all inputs need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_core.errors import BackendUnavailable
from nsa_core.torch_ops import autograd
from nsa_core.torch_ops.backend_call import in_layout, run_backend
from nsa_core.torch_ops.call_wrapper import import_function
from nsa_core.torch_ops.schema import (
    TAIL,
    Tail,
    define,
    operator_namespace,
    results_schema,
    tensors_schema,
)
from nsa_core.torch_ops.slot_op import SlotOp
from nsa_core.torch_ops.vmap_rule import TAIL_LENGTH
from nsa_core.util.planning_lock import planning_lock
from nsa_core.util.text import describe_error

# The tensors that the backward takes after the gradient of o, in this order.
DIFFERENTIABLE = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
STATISTICS = ("blocks", "lse_cmp", "lse_sel", "lse_win")
OUTPUTS = ("o_cmp", "o_sel", "o_win")
_BLOCKS = 1 + len(DIFFERENTIABLE)  # position of the blocks, after the gradient of o


class CoreBackward:
    """The fused backward of one backend.

    Attributes:
        backend: Name of the backend.
        cmp: The operators of cmp if another backend runs it; None: the fused backward computes it.
        op: The overload of its operator. Its arguments are the gradient of o, the tensors of
            DIFFERENTIABLE, STATISTICS and OUTPUTS, cu_seqlens, max_seqlen, scale, geometry,
            deterministic and first_query, which is None. It returns a gradient for each of
            DIFFERENTIABLE.
    """

    def __init__(self, backend: str, path: str, short: str, cmp: SlotOp | None) -> None:
        self.backend, self.cmp = backend, cmp
        self._function: Callable[..., Any] = import_function(backend, path)
        self._lib = torch.library.Library(operator_namespace(backend), "FRAGMENT")
        tensors = tensors_schema(("do", *DIFFERENTIABLE, *STATISTICS, *OUTPUTS))
        schema = f"{short}({tensors}, {TAIL}) -> {results_schema(len(DIFFERENTIABLE))}"
        self.op = define(self._lib, schema, self._run, self._fake)
        autograd.register_backward(
            self._lib, short, self.op, self._run, f"backend {backend!r}, core"
        )
        _operators[self.op] = self

    def gradients(self, direct: bool, tensors: list[torch.Tensor], tail: Any) -> Any:
        """Return a gradient for each of DIFFERENTIABLE.

        Args:
            direct: Whether to call the backend's function without the dispatcher, which would hold
                the outputs of the branches until the function returns.
            tensors: The tensors of the operator; emptied, so that the outputs live until their last
                use.
            tail: The other arguments of the operator.
        """
        if direct:
            return self._call(tensors, tail)
        return self.op(*tensors, *tail)

    def _run(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Run the operator."""
        return self._call(list(args[:-TAIL_LENGTH]), args[-TAIL_LENGTH:])

    def _call(self, tensors: list[torch.Tensor], tail: Any) -> tuple[torch.Tensor, ...]:
        """Call the backend's function, and check its results; ``tensors`` is emptied."""
        arguments = in_layout(tensors, _BLOCKS)
        tensors.clear()
        arguments, outputs = arguments[: -len(OUTPUTS)], arguments[-len(OUTPUTS) :]
        specs = [(t.shape, t.dtype) for t in arguments[1 : 1 + len(DIFFERENTIABLE)]]
        where, call = (self.backend, "core", "backward"), Tail(*tail).call()
        options = {"outputs": outputs, "call": call}
        if self.cmp is not None:
            cmp_backward = self.cmp.gradients(direct=True)
            options["cmp_backward"] = lambda *rows: cmp_backward(*rows, *tail)
        device = arguments[0].device
        return tuple(run_backend(where, self._function, arguments, specs, device, options))

    def _fake(self, *args: Any) -> tuple[torch.Tensor, ...]:
        """Return empty tensors with the shapes and dtypes of the results."""
        return tuple(t.new_empty(t.shape) for t in args[1 : 1 + len(DIFFERENTIABLE)])


_operators: dict[Any, CoreBackward] = {}  # by the overload of the operator
_of_path: dict[tuple[str, str, SlotOp | None], CoreBackward] = {}


def operator_of(op: Any) -> CoreBackward:
    """Return the fused backward whose overload is ``op``."""
    return _operators[op]


def core_backward(backend: str, path: str, cmp: SlotOp | None = None) -> CoreBackward:
    """Return the fused backward ``path`` of a backend, defined once per process and ``cmp``.

    Args:
        backend: Name of the backend.
        path: "module:function".
        cmp: The operators of cmp if another backend runs it.

    Raises:
        BackendUnavailable: The function cannot be imported.
    """
    with planning_lock:
        if (backend, path, cmp) not in _of_path:
            number = f"_{len(_of_path) + 1}" if _of_path else ""
            try:
                fused = CoreBackward(backend, path, f"core_backward{number}", cmp)
            except (ImportError, AttributeError) as error:
                raise BackendUnavailable(
                    f"backend {backend!r}: its fused backward {path} cannot be imported:"
                    f" {describe_error(error)}; choose another backend by name"
                ) from error
            _of_path[backend, path, cmp] = fused
        return _of_path[backend, path, cmp]
