"""Drawn: what a line of text describes, by a word that names its kind and key=value words.

A wrong line is refused before torch is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from nsa_core.config import NSAConfig
from nsa_core.contract import DTYPES
from nsa_core.errors import InvalidInput
from nsa_core.limits import SEED

if TYPE_CHECKING:
    import torch

    from nsa_verify.problems.cases import Case
    from nsa_verify.problems.findings import Findings

LARGEST = 1 << 20
AnyDrawn = TypeVar("AnyDrawn", bound="Drawn")


def _field(default: Any, read: Callable[[str], Any], allowed: str) -> Any:
    """Return a dataclass field; ``read`` raises ValueError or KeyError for text without a value."""
    return dataclasses.field(default=default, metadata={"read": read, "allowed": allowed})


def read_integer(text: str, least: int = 0, most: int = LARGEST) -> int:
    """Return the integer that ``text`` writes in decimal digits.

    Raises:
        ValueError: It is no such integer, or not from ``least`` to ``most``.
    """
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
        raise ValueError(text)
    return int(text)


def read_integers(text: str) -> tuple[int, ...]:
    """Return the integers that commas separate; raises ValueError as :func:`read_integer`."""
    return tuple(read_integer(part) for part in text.split(","))


def integer(default: int | None, least: int = 1, most: int = LARGEST) -> Any:
    """Return a field of an integer from ``least`` to ``most``."""
    allowed = f"an integer from {least} to {most}"
    return _field(default, lambda text: read_integer(text, least, most), allowed)


def integers(*default: int) -> Any:
    """Return a field of integers from 0 to LARGEST."""
    allowed = f"integers of 0 to {LARGEST} joined by commas, such as 0,5,1"
    return _field(default, read_integers, allowed)


def one_of(default: str, choices: Sequence[str]) -> Any:
    """Return a field of one of ``choices``."""
    return _field(default, {x: x for x in choices}.__getitem__, f"one of {', '.join(choices)}")


def some_of(choices: Sequence[str]) -> Any:
    """Return a field of some of ``choices``; the default is none."""
    known = {choice: choice for choice in choices}
    allowed = f"names joined by commas, of {', '.join(choices)}"
    return _field((), lambda text: tuple(known[name] for name in text.split(",")), allowed)


def switch() -> Any:
    """Return a field that is off by default."""
    return _field(False, {"off": False, "on": True}.__getitem__, "off or on")


def _read_scale(text: str) -> float | None:
    if text == "none":
        return None
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """The kind of a line, and the fields that cases, decode steps and histories share.

    ``str(drawn)`` is the line; :func:`nsa_verify.drawn.parser.parse` reads it.

    Attributes:
        kind: First word of the line.
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
        seed: Seed of the random numbers.
    """

    # Shrinking leaves these fields alone, and sets others to their defaults, these first.
    FIXED: ClassVar[tuple[str, ...]] = ()
    FIRST: ClassVar[tuple[str, ...]] = ("groups", "h")
    SMALLER: ClassVar[tuple[str, ...]] = ("groups", "h", "n", "w", "dk", "dv")
    OPERATIONS: ClassVar[Mapping[str, int]] = {}  # keys that a line may repeat

    kind: str = dataclasses.field(kw_only=False)
    dtype: str = one_of("float32", DTYPES)
    l: int = integer(4)  # noqa: E741  # the symbol of the paper
    d: int = integer(4)
    block: int = integer(4)
    n: int = integer(1)
    init: int = integer(0, 0)
    local: int = integer(0, 0)
    w: int = integer(4)
    h: int = integer(1)
    groups: int = integer(1)
    dk: int = integer(16)
    dv: int = integer(16)
    scale: float | None = _field(None, _read_scale, "a finite number or none")
    seed: int = integer(0, 0, SEED)

    def __str__(self) -> str:
        """Return the line; values equal to the defaults are left out."""
        words = [self.kind]
        for field in sorted(fields_of(type(self)), key=lambda field: field.name == "seed"):
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_written(value)}")
        return " ".join(words)

    @property
    def slot(self) -> str:
        """Slot of a finding that concerns the whole."""
        return ""

    @property
    def check_name(self) -> str:
        """Name of the check that runs it."""
        raise NotImplementedError

    @property
    def lengths_of_case(self) -> tuple[tuple[int, ...], int, bool]:
        """Lengths, batch and ``packed`` of its Case."""
        raise NotImplementedError

    @functools.cached_property
    def config(self) -> NSAConfig:
        """The layer configuration.

        Raises:
            InvalidInput: The sizes are invalid; the message names every invalid field.
        """
        return self._config()

    def _config(self, **more: Any) -> NSAConfig:
        fields: dict[str, Any] = {
            "dim": max(1, self.h * self.groups * self.dk),
            "n_heads": self.h * self.groups,
            "n_kv_heads": self.groups,
            "head_dim": self.dk,
            "v_head_dim": self.dv,
            "compress_block_size": self.l,
            "compress_stride": self.d,
            "select_block_size": self.block,
            "num_selected_blocks": self.n,
            "init_blocks": self.init,
            "local_blocks": self.local,
            "window_size": self.w,
            "scale": self.scale,
            "rope": False,
        }
        return NSAConfig(**fields | more)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @functools.cached_property
    def findings(self) -> Findings:
        """Makes the findings of its check, whose case is the line."""
        from nsa_verify.problems.findings import Findings

        return Findings(self.check_name, self.case(str(self)), self.torch_dtype)

    def case(self, name: str) -> Case:
        """Return a case called ``name`` with the configuration and the lengths."""
        from nsa_verify.problems.cases import Case

        lengths, batch, packed = self.lengths_of_case
        return Case(name, self.config, lengths, batch, packed, seed=self.seed)

    def check(self) -> None:
        """Raise InvalidInput if the sizes do not fit together."""
        if problems := [*self.problems()]:
            raise InvalidInput("case: " + "; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each value that does not fit the others.

        Raises:
            InvalidInput: The layer configuration is invalid.
        """
        self.config.geometry  # noqa: B018  # raises InvalidInput
        return iter(())

    def simpler(self: AnyDrawn) -> Iterator[AnyDrawn]:
        """Yield simpler neighbours, those that save most first. They may be invalid."""
        yield from self.shorter()
        defaults = {field.name: field.default for field in fields_of(type(self))}
        for name in dict.fromkeys((*self.FIRST, *defaults)):
            if name not in ("seed", *self.FIXED) and getattr(self, name) != defaults[name]:
                yield self.replace(**{name: defaults[name]})
        for name in self.SMALLER:
            for smaller in below(getattr(self, name), 1):
                yield self.replace(**{name: smaller})

    def shorter(self: AnyDrawn) -> Iterator[AnyDrawn]:
        """Yield neighbours with fewer tokens, sequences or operations."""
        return iter(())

    def replace(self: AnyDrawn, **changes: Any) -> AnyDrawn:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **changes)


def fields_of(kind: type[Drawn]) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a line that are written as key=value."""
    return tuple(field for field in dataclasses.fields(kind) if "read" in field.metadata)


def below(value: int, least: int) -> list[int]:
    """Return integers below ``value`` and not below ``least`` to try, the smallest first."""
    return sorted({least, value // 2, value - 1} & set(range(least, value)))


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value!r}" if isinstance(value, float) else str(value)
