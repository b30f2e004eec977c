"""GeneratedCase: one slot call, described by values that fit on a line and come back from it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from nsa_core.config import NSAConfig
from nsa_core.contract import DTYPES, SLOTS
from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean
from nsa_verify.cases import Case

LAYOUTS = ("plain", "transposed", "gaps", "offset", "expanded", "strided")
BLOCKS = ("sorted", "sorted64", "messy", "messy64", "none")
SCORES = ("normal", "tiny", "zero", "large")
VALUES = ("normal", "small", "outlier", "steep")
GATES = ("sigmoid", "negative", "above1", "zero")
POISONS = ("none", "nan_q", "nan_k", "nan_v", "inf_v")
PARTIAL_CHECK = "partial queries"  # the check of cases with first_query


@dataclasses.dataclass(frozen=True)
class GeneratedCase:
    """One call of one slot, forward and backward.

    Attributes:
        slot: The slot.
        dtype: Name of the dtype of q, k and v.
        l: Compression block.
        d: Compression stride.
        block: Selection block, l'.
        n: Selected blocks; in sel, entries of ``blocks`` per token and kv head.
        init: Blocks at the start that are always selected.
        local: Blocks up to the current one that are always selected.
        w: Window.
        h: Query heads per kv head.
        groups: kv heads.
        dk: Width of queries and keys.
        dv: Width of values.
        scale: Softmax scale; None is 1 / sqrt(dk).
        tokens: Tokens of each sequence of a dense case.
        batch: Sequences of a dense case.
        documents: Lengths of the packed documents; empty in a dense case.
        first_query: Position of row 0 of q on the axis of the keys, for queries that begin inside a
            sequence; None: q holds every row of that axis.
        queries: Rows of q from ``first_query`` on; None: all of them. The keys behind the last
            query are extra keys, which no query sees.
        layout: Memory layout of the inputs, one of LAYOUTS.
        do_layout: Memory layout of the gradient of o.
        blocks: Kind of the blocks that sel receives, one of BLOCKS.
        scores: Size of the scores, one of SCORES.
        values: Kind of the values, one of VALUES.
        gates: Kind of the gates, one of GATES.
        poison: The NaN or Inf that a second forward receives, one of POISONS.
        seed: Seed of the random numbers.
    """

    slot: str
    dtype: str = "float32"
    l: int = 4  # noqa: E741  # the symbol of the paper
    d: int = 4
    block: int = 4
    n: int = 1
    init: int = 0
    local: int = 0
    w: int = 4
    h: int = 1
    groups: int = 1
    dk: int = 16
    dv: int = 16
    scale: float | None = None
    tokens: int = 8
    batch: int = 1
    documents: tuple[int, ...] = ()
    first_query: int | None = None
    queries: int | None = None
    layout: str = "plain"
    do_layout: str = "plain"
    blocks: str = "sorted"
    scores: str = "normal"
    values: str = "normal"
    gates: str = "sigmoid"
    poison: str = "none"
    seed: int = 0

    @property
    def config(self) -> NSAConfig:
        """The layer configuration of the case.

        Raises:
            InvalidInput: The sizes are invalid; the message names every invalid field.
        """
        return NSAConfig(
            dim=max(1, self.h * self.groups * self.dk),
            n_heads=self.h * self.groups,
            n_kv_heads=self.groups,
            head_dim=self.dk,
            v_head_dim=self.dv,
            compress_block_size=self.l,
            compress_stride=self.d,
            select_block_size=self.block,
            num_selected_blocks=self.n,
            init_blocks=self.init,
            local_blocks=self.local,
            window_size=self.w,
            scale=self.scale,
            rope=False,
        )

    @property
    def packed(self) -> bool:
        """Whether the tensors are packed documents."""
        return bool(self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each document, or of each sequence of the batch."""
        return self.documents or (self.tokens,) * self.batch

    @property
    def check(self) -> str:
        """Name of the check that runs the case."""
        return f"generated {self.slot}" if self.first_query is None else PARTIAL_CHECK

    @property
    def axis(self) -> int:
        """Length of the axis of the keys: of each dense sequence, or of all documents together."""
        return sum(self.documents) if self.packed else self.tokens

    @property
    def query_rows(self) -> tuple[int, int]:
        """The rows of the axis of the keys that q holds, as (first row, row behind the last)."""
        first = self.first_query or 0
        return first, self.axis if self.queries is None else first + self.queries

    @property
    def query_spans(self) -> list[tuple[int, int, int]]:
        """The rows of q of each document or sequence.

        Each is (first row, row behind the last, position of the first row in the document).
        """
        first, end = self.query_rows
        if not self.packed:
            return [(0, end - first, first)] * self.batch
        spans, start = [], 0
        for length in self.documents:
            begin, stop = max(first, start), min(end, start + length)
            spans.append((begin - first, max(stop, begin) - first, begin - start))
            start += length
        return spans

    @property
    def rows(self) -> int:
        """Query rows times kv heads: the work of the oracle."""
        return sum(end - begin for begin, end, _ in self.query_spans) * self.groups

    def validate(self) -> None:
        """Check that the sizes fit together.

        Raises:
            InvalidInput: They do not; the message names the sizes.
        """
        self.config.geometry  # noqa: B018  # raises InvalidInput for wrong block sizes
        if self.first_query is None and self.queries is not None:
            raise InvalidInput(
                f"case: queries={self.queries} needs first_query, such as first_query=0"
            )
        if self.first_query is not None and self.slot == "combine":
            raise InvalidInput(
                "case: combine reads no keys; leave first_query out, or choose another slot"
            )
        first, end = self.query_rows
        if not 0 <= first <= end <= self.axis:
            raise InvalidInput(
                f"case: the queries {first} .. {end} must lie in the {self.axis} rows of keys;"
                " change first_query and queries, or tokens and documents"
            )

    def as_case(self) -> Case:
        """Return a case with the name, the configuration and the lengths of this one."""
        lengths = self.documents or (self.tokens,)
        batch = 1 if self.packed else self.batch
        return Case(self.text(), self.config, lengths, batch=batch, packed=self.packed)

    def text(self) -> str:
        """Return the case as ``name=value`` pairs; values equal to the defaults are left out."""
        pairs = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "slot" or value != field.default:
                pairs.append(f"{field.name}={_written(value)}")
        return ",".join(pairs)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return "none" if value is None else f"{value!r}" if isinstance(value, float) else str(value)


_CHOICES: dict[str, tuple[str, ...]] = {
    "slot": SLOTS,
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "do_layout": LAYOUTS,
    "blocks": BLOCKS,
    "scores": SCORES,
    "values": VALUES,
    "gates": GATES,
    "poison": POISONS,
}
# The other numbers start at 1.
_FROM_ZERO = ("init", "local", "tokens", "batch", "seed", "first_query", "queries")
_LARGEST = 1 << 20


def parse_case(text: str) -> GeneratedCase:
    """Parse the line that :meth:`GeneratedCase.text` writes.

    Raises:
        InvalidInput: A pair is not ``name=value``, a name is unknown or occurs twice, a value is
            invalid, the slot is missing, or the sizes do not fit together.

    Example:
        >>> parse_case("slot=win,w=3,tokens=5").w
        3
    """
    fields: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(GeneratedCase)]
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise InvalidInput(
                f"case must be name=value pairs such as slot=sel,l=8,tokens=20, got {item!r} in"
                f" {text!r}"
            )
        if name not in names:
            raise InvalidInput(f"case: unknown name {name!r}{did_you_mean(name, names)}")
        if name in fields:
            raise InvalidInput(f"case names {name} twice in {text!r}")
        fields[name] = _read(name, value)
    if "slot" not in fields:
        raise InvalidInput(f"case must have a slot, such as slot=sel, got {text!r}")
    case = GeneratedCase(**fields)
    if case.packed and ("tokens" in fields or "batch" in fields):
        raise InvalidInput("case: documents are packed; leave tokens and batch out")
    case.validate()
    return case


def _read(name: str, value: str) -> Any:
    """Return the value of the field ``name``.

    Raises:
        InvalidInput: The value is invalid for this field.
    """
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise InvalidInput(
                f"case: {name} must be one of {', '.join(_CHOICES[name])}, got {value!r}"
            )
        return value
    try:
        if name == "scale":
            scale = None if value == "none" else float(value)
            if scale is None or math.isfinite(scale):
                return scale
        elif name == "documents":
            lengths = tuple(int(length) for length in value.split("+"))
            if all(0 <= length <= _LARGEST for length in lengths):
                return lengths
        else:
            number = int(value)
            if (0 if name in _FROM_ZERO else 1) <= number <= _LARGEST or name == "seed":
                return number
    except ValueError:
        pass
    allowed = {
        "scale": "a finite number or none",
        "documents": f"lengths of 0 to {_LARGEST} joined by +, such as 0+5+1",
    }.get(name, f"an integer from {0 if name in _FROM_ZERO else 1} to {_LARGEST}")
    raise InvalidInput(f"case: {name} must be {allowed}, got {value!r}")
