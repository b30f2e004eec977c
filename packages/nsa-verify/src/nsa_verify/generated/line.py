"""Line: the sizes of a layer as fields that are written as name=value pairs, and read again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from nsa_core.config import NSAConfig
from nsa_core.contract import DTYPES
from nsa_core.errors import InvalidInput
from nsa_core.limits import SEED
from nsa_core.util.text import did_you_mean

LARGEST = 1 << 20
_Line = TypeVar("_Line", bound="Line")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The fields that generated cases and generated steps share.

    Attributes:
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

    FIRST: ClassVar[str]  # the field that is always on the line, as its first
    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]]
    FROM_ZERO: ClassVar[tuple[str, ...]]  # fields that may be 0
    LISTS: ClassVar[tuple[str, ...]]  # fields that are lists of lengths
    NAMES: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # fields that are lists of these names

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
    seed: int = 0

    @property
    def config(self) -> NSAConfig:
        """The layer configuration.

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

    def text(self) -> str:
        """Return the fields as ``name=value`` pairs; values equal to the defaults are left out."""
        pairs = [f"{self.FIRST}={getattr(self, self.FIRST)}"]
        for field in sorted(dataclasses.fields(self), key=lambda field: field.name == "seed"):
            value = getattr(self, field.name)
            if field.name != self.FIRST and value != field.default:
                pairs.append(f"{field.name}={_written(value)}")
        return ",".join(pairs)

    def check(self) -> None:
        """Raise InvalidInput if the sizes do not fit together."""
        self.config.geometry  # noqa: B018  # raises InvalidInput

    def simpler(self: _Line) -> Iterator[_Line]:
        """Yield simpler neighbours, those that save most first. They may be invalid."""
        raise NotImplementedError

    def with_defaults(
        self: _Line, first: tuple[str, ...], without: tuple[str, ...]
    ) -> Iterator[_Line]:
        """Yield neighbours with one field at its default, those of ``first`` before the others."""
        defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self)}
        for name in (*first, *(name for name in defaults if name not in first)):
            if name not in (self.FIRST, "seed", *without) and getattr(self, name) != defaults[name]:
                yield dataclasses.replace(self, **{name: defaults[name]})

    def with_smaller(self: _Line, *names: str) -> Iterator[_Line]:
        """Yield neighbours in which one of the numbers ``names`` is smaller, but at least 1."""
        for name in names:
            for smaller in below(getattr(self, name), 1):
                changes: dict[str, Any] = {name: smaller}
                yield dataclasses.replace(self, **changes)


def below(value: int, least: int) -> list[int]:
    """Return integers below ``value`` and not below ``least`` to try, the smallest first."""
    return sorted({least, value // 2, value - 1} & set(range(least, value)))


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return "none" if value is None else f"{value!r}" if isinstance(value, float) else str(value)


def read_line(kind: type[_Line], pairs: Mapping[str, str]) -> _Line:
    """Return the ``kind`` with the fields that ``pairs`` gives as text.

    Raises:
        InvalidInput: A name is unknown, a value is invalid, or the sizes do not fit together.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    fields: dict[str, Any] = {}
    for name, value in pairs.items():
        if name not in names:
            raise InvalidInput(f"case: unknown name {name!r}{did_you_mean(name, names)}")
        fields[name] = _read(kind, name, value)
    line = kind(**fields)
    line.check()
    return line


def _read(kind: type[Line], name: str, value: str) -> Any:
    """Return the value of the field ``name``.

    Raises:
        InvalidInput: The value is invalid for this field.
    """
    choices = {"dtype": DTYPES, **kind.CHOICES}
    if name in choices:
        if value not in choices[name]:
            raise InvalidInput(
                f"case: {name} must be one of {', '.join(choices[name])}, got {value!r}"
            )
        return value
    least = 0 if name in ("init", "local", "seed", *kind.FROM_ZERO) else 1
    try:
        if name == "scale":
            scale = None if value == "none" else float(value)
            if scale is None or math.isfinite(scale):
                return scale
        elif name in kind.NAMES:
            parts = tuple(value.split("+"))
            if all(part in kind.NAMES[name] for part in parts):
                return parts
        elif name in kind.LISTS:
            lengths = tuple(int(length) for length in value.split("+"))
            if all(0 <= length <= LARGEST for length in lengths):
                return lengths
        else:
            number = int(value)
            if least <= number <= (SEED if name == "seed" else LARGEST):
                return number
    except ValueError:
        pass
    allowed = f"an integer from {least} to {SEED if name == 'seed' else LARGEST}"
    if name == "scale":
        allowed = "a finite number or none"
    elif name in kind.NAMES:
        allowed = f"names joined by +, of {', '.join(kind.NAMES[name])}"
    elif name in kind.LISTS:
        allowed = f"lengths of 0 to {LARGEST} joined by +, such as 0+5+1"
    raise InvalidInput(f"case: {name} must be {allowed}, got {value!r:.80}")
