"""History: a layer, a cache and the operations on it, and their form as one line of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.limits import as_integer
from nsa_core.util.text import did_you_mean
from nsa_verify.generated.line import LARGEST

# A line of text states only the fields that differ from these.
BASE = NSAConfig(
    dim=12,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    v_head_dim=8,
    compress_block_size=4,
    compress_stride=2,
    select_block_size=4,
    num_selected_blocks=3,
    window_size=5,
    compress="mean",
)
_CONFIG_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(NSAConfig)
    if field.name not in ("dropout", "causal", "rope_base", "rope_frequencies")
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call on a cache.

    Attributes:
        kind: "step", "crop", "reorder", "reset", "save", "load", "release" or "reserve".
        values: The integers of the call. step: new tokens of each sequence. crop, reserve: a length
            per sequence. reorder: a former sequence per sequence. reset, save: a sequence. load: a
            snapshot, by its number, and a sequence. release: a snapshot.
        padding: Rows of a step after the longest sequence.
    """

    kind: str
    values: tuple[int, ...]
    padding: int = 0

    def __str__(self) -> str:
        padding = f"+{self.padding}" if self.padding else ""
        return f"{self.kind}={','.join(map(str, self.values))}{padding}"

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return max(self.values) + self.padding


# Each kind, and its number of integers: per sequence (0) or fixed.
KINDS = {
    "step": 0,
    "crop": 0,
    "reorder": 0,
    "reserve": 0,
    "reset": 1,
    "save": 1,
    "release": 1,
    "load": 2,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The arguments of ``new_cache``, the limit of a chunk, and the seed of the numbers.

    Attributes:
        batch: Number of sequences.
        max_len: Maximum tokens per sequence.
        page_size: Tokens per page; 0 for a cache without pages.
        num_pages: Number of pages; 0 for enough.
        max_rollback: Tokens that a crop may remove.
        max_step: Rows of a captured step; a longer step is a chunk.
        chunk_rows: A chunk of more rows is cut.
        seed: Seed of the parameters of the layer and of its inputs.
    """

    batch: int = 1
    max_len: int = 40
    page_size: int = 0
    num_pages: int = 0
    max_rollback: int = 0
    max_step: int = 64
    chunk_rows: int = 8192
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class History:
    """A layer, the sizes of a cache, and operations on it.

    ``str(history)`` is one line; :func:`parse_history` reads it.
    """

    config: NSAConfig
    sizes: Sizes
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        words = [*_differences(self.config, BASE, _CONFIG_FIELDS)]
        words += _differences(self.sizes, Sizes(), _SIZE_FIELDS)
        return " ".join([*words, *map(str, self.operations)])


_SIZE_FIELDS = tuple(field.name for field in dataclasses.fields(Sizes))


def _differences(actual: Any, base: Any, names: Iterable[str]) -> list[str]:
    pairs = [(name, getattr(actual, name)) for name in names]
    return [f"{name}={value}" for name, value in pairs if value != getattr(base, name)]


def parse_history(text: str) -> History:
    """Parse the line of a history, such as "window_size=1 batch=2 step=5,3 crop=4,3 step=1,1".

    Fields of NSAConfig and of :class:`Sizes` come in any order, and have the values of ``BASE`` and
    ``Sizes()`` if they are absent. Operations run in the order of the line.

    Raises:
        InvalidInput: A word is not ``name=value``, its name is unknown or stands twice, its value
            has the wrong type, or an operation has the wrong number of integers.
    """
    config: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    operations = []
    for word in text.split():
        name, equals, value = word.partition("=")
        known = (*KINDS, *_SIZE_FIELDS, *_CONFIG_FIELDS)
        if not equals or name not in known:
            raise InvalidInput(
                f"history: {word!r} must be name=value with the name of an operation, of a size of"
                f" the cache or of a field of NSAConfig{did_you_mean(name, known)}"
            )
        if name in KINDS:
            operations.append(_operation(name, value))
            continue
        target, base = (sizes, Sizes()) if name in _SIZE_FIELDS else (config, BASE)
        if name in target:
            raise InvalidInput(f"history: {name} stands twice; give it once")
        target[name] = _value(name, value, getattr(base, name))
    history = History(dataclasses.replace(BASE, **config), Sizes(**sizes), tuple(operations))
    _check_counts(history)
    return history


def _operation(kind: str, value: str) -> Operation:
    numbers, plus, padding = value.partition("+")
    if plus and kind != "step":
        raise InvalidInput(f"history: {kind}={value}: only a step has rows of padding")
    values = tuple(_integer(kind, number) for number in numbers.split(","))
    return Operation(kind, values, _integer(kind, padding) if plus else 0)


def _integer(name: str, text: str) -> int:
    number = as_integer(text)
    if number is None:
        raise InvalidInput(f"history: {name} needs integers >= 0, got {text!r:.80}")
    if number > LARGEST and name != "seed":
        raise InvalidInput(f"history: {name} must be <= {LARGEST}, got {number}")
    return number


def _value(name: str, text: str, base: Any) -> Any:
    """Convert ``text`` to the type of the field ``name``, whose base value is ``base``."""
    if name == "scale":
        try:
            return None if text == "None" else float(text)
        except ValueError as error:
            raise InvalidInput(f"history: scale must be a number or None, got {text!r}") from error
    if isinstance(base, bool):
        values: Mapping[str, bool] = {"True": True, "False": False}
        if text not in values:
            raise InvalidInput(f"history: {name} must be True or False, got {text!r}")
        return values[text]
    return text if isinstance(base, str) else _integer(name, text)


def _check_counts(history: History) -> None:
    batch = history.sizes.batch
    for operation in history.operations:
        expected = KINDS[operation.kind] or batch
        if len(operation.values) != expected:
            raise InvalidInput(
                f"history: {operation} has {len(operation.values)} integers, expected {expected}"
                + (" (one per sequence of the batch)" if not KINDS[operation.kind] else "")
            )
