"""Replay a history on a real layer and cache, and compare each operation with the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from nsa_core.cache.cache import NSACache, Snapshot
from nsa_core.contract import DecodeCall
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.plan.plan import Plan
from nsa_verify.drawn.caches import layers
from nsa_verify.drawn.caches.contents import Fault, content_faults
from nsa_verify.drawn.caches.history import History, Operation
from nsa_verify.drawn.caches.model import Model

if TYPE_CHECKING:
    from collections.abc import Callable


class Called(NamedTuple):
    """One call of select, or of a fused step, during an operation.

    Attributes:
        q: Its queries.
        blocks: The selected blocks.
        call: Its arguments, with the lengths of that time; None in a prefill and a long chunk.
        first_query: Position of the first row of q in a long chunk, in the given keys; else None.
    """

    q: torch.Tensor
    blocks: torch.Tensor
    call: DecodeCall | None
    first_query: int | None


@dataclasses.dataclass(frozen=True)
class Done:
    """A step that a cache took.

    Attributes:
        operation: The step.
        before: Length of each sequence before it.
        model: The sequences after it.
        y: The layer's output [B, rows, dim].
        calls: The calls that selected blocks.
        projected: Input and output of each call of the output projection, [b, rows, width].
    """

    operation: Operation
    before: list[int]
    model: Model
    y: torch.Tensor
    calls: list[Called]
    projected: list[tuple[torch.Tensor, torch.Tensor]]


class Interrupted(Exception):
    """An operation ended with an error that a test injected.

    Attributes:
        undone: Whether the cache undid the operation; else it was complete.
    """

    def __init__(self, undone: bool) -> None:
        super().__init__()
        self.undone = undone


@dataclasses.dataclass(frozen=True)
class Plans:
    """The plans of a history.

    Attributes:
        prefill: The plan of a prefill.
        decode: The plan of a decode step.
        partial: The plan of a long chunk; None: decode steps serve.
        device: The device of the layer.
    """

    prefill: Plan
    decode: Plan
    partial: Plan | None
    device: str


def recorded(plan: Plan, calls: list[Called]) -> Plan:
    """Return ``plan`` with kernels that append each selection of blocks to ``calls``.

    The kernels of the other slots are wrapped too: kernels alone would run in one operator.
    """

    def wrap(slot: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: torch.Tensor, *tensors: torch.Tensor, **options: Any) -> Any:
            result = kernel(q, *tensors, **options)
            if slot in ("select", "step"):
                call = options.get("call")
                if call is not None:  # the next step changes its tensors in place
                    changing = {n: getattr(call, n).clone() for n in ("starts", "lengths")}
                    call = dataclasses.replace(call, **changing)
                blocks = result if slot == "select" else result[1]
                calls.append(Called(q, blocks, call, options.get("first_query")))
            return result

        return run

    kernels: dict[str, Any] = {
        slot: wrap(slot, getattr(plan, slot)) for slot in ("cmp", "select", "sel", "win")
    }
    fused: dict[str, Any] = dict(plan.fused)
    if "step" in fused:
        fused["step"] = wrap("step", fused["step"])
    return dataclasses.replace(plan, **kernels, fused=fused)


StepJudge = Any  # Callable[[Replay, Done], Iterator[Fault]]


class Replay:
    """A layer and a cache on which the operations of a history run.

    Attributes:
        history: The history.
        attn: The layer.
        cache: The cache.
        model: The sequences that the cache must hold.
        rows: The rows of a prefill of a sequence.
    """

    def __init__(self, history: History, plans: Plans) -> None:
        self.history = history
        self._calls: list[Called] = []
        self.attn = layers.exact_layer(
            history,
            plans.device,
            recorded(plans.prefill, self._calls),
            None if plans.partial is None else recorded(plans.partial, self._calls),
        )
        self._projected: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.attn.out.register_forward_hook(
            lambda _, inputs, y: self._projected.append((*inputs, y))
        )
        self.cache: NSACache = self.attn.new_cache(
            history.batch,
            history.max_len,
            page_size=history.page_size or None,
            num_pages=history.num_pages or None,
            max_rollback=history.max_rollback,
            max_step=history.max_step,
            dtype=history.torch_dtype,
            plan=recorded(plans.decode, self._calls),
        )
        for store in self.cache.kv.tensors():
            store.fill_(torch.nan)  # a row that nothing wrote is a visible error
        self.fused_append = "append" in plans.decode.fused
        self.model = Model(history)
        self.rows = layers.Projections(self.attn)
        self._snapshots: list[Snapshot] = []

    def first_failure(self, judge: StepJudge) -> tuple[int, Fault] | None:
        """Run every operation; return the number of the first that has a fault, and the fault.

        A fault after the last operation has the number of operations. None means no fault.

        ``judge(replay, done)`` yields the faults of the result of a step. Operations on sequences
        or snapshots that do not exist are skipped, so every part of a history is a history.
        """
        with self.short_chunks():
            for number, operation in enumerate(self.history.operations):
                for fault in self.faults_of(operation, judge):
                    return number, fault
        for fault in self.page_faults():
            return len(self.history.operations), fault
        return None

    def short_chunks(self) -> AbstractContextManager[Any]:
        """Let short steps reach the code of long chunks, the decode forms and prefill kernels."""
        from nsa_core.cache import step as cache_step  # imported here: it imports the compiler

        limits: dict[str, Any] = {
            "MAX_CHUNK_ROWS": self.history.chunk_rows,
            "MIN_ROWS": {"cpu": 4, "cuda": 4},
        }
        patch: AbstractContextManager[Any] = mock.patch.multiple(cache_step, **limits)
        return patch

    def faults_of(
        self,
        operation: Operation,
        judge: StepJudge,
        run: Callable[[Operation], torch.Tensor | None] | None = None,
    ) -> Iterator[Fault]:
        """Run an operation, and yield its faults and those of the cache after it.

        Args:
            operation: The operation.
            judge: As in :meth:`first_failure`.
            run: Runs the operation, which it gets from :meth:`prepared`. It may raise
                :class:`Interrupted`.
        """
        model = self.model
        if not model.exists(operation):
            return
        before, must_refuse = model.lengths, model.refused(operation)
        self._calls.clear()
        self._projected.clear()
        try:
            y = self.prepared(operation)() if run is None else run(operation)
        except Interrupted as interrupted:
            if not interrupted.undone:
                model.apply(operation)
        except InvalidInput as error:
            lacks_pages = "out of pages" in str(error) and model.may_lack_pages(operation)
            if not (must_refuse or lacks_pages):
                yield Fault("", "refused", f"a valid operation was refused: {error}")
                return
        except (Unsupported, BackendUnavailable):
            raise
        except (NSAError, RuntimeError, LookupError, TypeError) as error:
            yield Fault("", "run", f"raised {type(error).__name__}: {error}")
            return
        else:
            if must_refuse:
                yield Fault("", "refused", f"{operation} must be refused, but was not")
                return
            model.apply(operation)
            if y is not None and operation.rows:
                yield from self._faults_of_output(operation, before, y, judge)
        yield from self.content_faults()

    def content_faults(self) -> Iterator[Fault]:
        """Yield the differences of the cache from the model."""
        expected = [self.rows.of(sequence.tokens) for sequence in self.model.sequences]
        yield from content_faults(self.cache, expected, self.model.spans, self.fused_append)

    def _faults_of_output(
        self, operation: Operation, before: list[int], y: torch.Tensor, judge: StepJudge
    ) -> Iterator[Fault]:
        expected_shape = (len(before), operation.rows, self.history.config.dim)
        if tuple(y.shape) != expected_shape:
            yield Fault("", "y", f"its shape is {tuple(y.shape)}, expected {expected_shape}")
            return
        for b, new in enumerate(operation.values):
            if bool((y[b, new:] != 0).any()):
                yield Fault("", "y of padding", f"not 0 in sequence {b}")
        calls, projected = list(self._calls), list(self._projected)
        yield from judge(self, Done(operation, before, self.model, y, calls, projected))

    def prepared(
        self, operation: Operation, new: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor | None]:
        """Return a function that calls the cache once, and returns the output of a step.

        Args:
            operation: The operation.
            new: Passed to a step in place of its numbers of tokens.
        """
        values, cache, kind = list(operation.values), self.cache, operation.kind
        if kind == "step":
            x = self._input(operation)
            every_row = new is None and min(values) == operation.rows
            counts = None if every_row else values if new is None else new
            return lambda: self.attn(x, cache=cache, new=counts)

        def call() -> None:
            if kind == "save":
                self._snapshots += [cache.snapshot(values[0])]
            elif kind == "load":
                cache.load(self._snapshots[values[0]], values[1])
            elif kind == "release":
                self._snapshots[values[0]].release()
            else:
                getattr(cache, kind)(values)

        return call

    def _input(self, operation: Operation) -> torch.Tensor:
        """Return the next tokens of each sequence; the padding is NaN."""
        shape = (self.history.batch, operation.rows, self.history.config.dim)
        x = torch.full(shape, torch.nan).to(self.attn.out.weight)
        for b, tokens in enumerate(self.model.next_tokens(operation.values)):
            x[b, : len(tokens)] = layers.inputs(tokens, self.attn)
        return x

    def page_faults(self) -> Iterator[Fault]:
        """Check that no page is lost: after a reset and without snapshots, all are free."""
        for snapshot in self._snapshots:
            snapshot.release()
        self.cache.reset()
        pages = self.cache.pages
        if pages is not None and pages.free != pages.total:
            detail = f"{pages.free} of {pages.total} are free after a reset of every sequence"
            yield Fault("", "pages", detail)
