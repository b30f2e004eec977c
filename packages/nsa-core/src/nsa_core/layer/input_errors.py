"""Name the cause if inputs of nsa_attention do not fit: one sentence per cause, with the fix.

The code runs only after a check has failed. A wrong tensor often contradicts several others; the
functions here find the tensors that explain the contradictions, and drop the complaints about the
others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.dtypes import dtype_name
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.tensor_checks import TensorOrMetadata

Shape = tuple[int, ...]
_AXES: dict[str, tuple[str, ...]] = {
    "q": ("B", "S", "Hq", "Dk"),
    "k": ("B", "S", "G", "Dk"),
    "v": ("B", "S", "G", "Dv"),
    "gates": ("B", "S", "Hq", "3"),
    "k_cmp": ("B", "n_c", "G", "Dk"),
    "v_cmp": ("B", "n_c", "G", "Dv"),
    "blocks": ("B", "S", "G", "n"),
}
_FIELDS = {"Hq": "n_heads", "G": "n_kv_heads", "Dk": "head_dim", "Dv": "v_head_dim"}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Sizes(NamedTuple):
    """The sizes that the tensors of a call must have.

    Attributes:
        config: the config of the call; None if its head counts and widths follow from the tensors.
        source: name of ``config`` in messages, "config" or "plan.config".
        geometry: the block sizes.
        packed: whether the tensors are packed documents, without the axis B.
    """

    config: NSAConfig | None
    source: str
    geometry: BlockGeometry
    packed: bool

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the symbols of the axes of the tensor ``name``."""
        symbols = _AXES[argument(name)]
        return symbols[1:] if self.packed else symbols

    def layout(self, name: str) -> str:
        """Return the layout of the tensor ``name``, for example "[B, S, Hq, Dk]"."""
        symbols = ["T" if s == "S" and self.packed else s for s in self.axes(name)]
        return f"[{', '.join(symbols)}]"

    def required(self, symbol: str) -> int | None:
        """Return the size that the config requires for ``symbol``; None if it requires none."""
        if symbol == "3":
            return 3
        if self.config is None or symbol not in _FIELDS:
            return None
        size: int = getattr(self.config, _FIELDS[symbol])
        return size


def argument(name: str) -> str:
    """Return the argument of nsa_attention that holds the tensor ``name``: "k" for "k[sel]"."""
    return name.partition("[")[0]


def joined(names: Sequence[str]) -> str:
    """Return "q", "q and k" or "q, k and v"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _plural(names: Sequence[str]) -> bool:
    return len(names) > 1 or names[0] in ("gates", "blocks")


def _be(names: Sequence[str]) -> str:
    return f"{joined(names)} {'are' if _plural(names) else 'is'}"


def _have(names: Sequence[str]) -> str:
    return f"{joined(names)} {'have' if _plural(names) else 'has'}"


def shape_errors(shapes: Mapping[str, Shape], sizes: Sizes) -> list[str]:
    """Return one sentence per cause if ``shapes`` do not fit each other; [] if they do.

    Args:
        shapes: shape of each tensor: q, gates, k and v (or "k[cmp]", "k[sel]", ...), k_cmp, v_cmp
            and blocks.
        sizes: the sizes that they must have.
    """
    if errors := _rank_errors(shapes, sizes):
        return errors
    errors, shapes = _gates_errors(dict(shapes), sizes)
    sentence, shapes = _layout_error(shapes, sizes)
    return [*errors, *([sentence] if sentence else []), *_size_errors(shapes, sizes)]


def _rank_errors(shapes: Mapping[str, Shape], sizes: Sizes) -> list[str]:
    """Errors of tensors with a wrong number of axes."""
    rank = 3 if sizes.packed else 4
    wrong = [name for name, shape in shapes.items() if len(shape) != rank]
    if not wrong:
        return []
    if all(len(shape) == 7 - rank for shape in shapes.values()):
        names = joined(list(shapes))
        if sizes.packed:
            return [
                f"{names} have a batch axis, but cu_seqlens is passed: pass packed documents"
                " [T, H, D] (nsa_core.unpad packs a padded batch), or leave out cu_seqlens"
            ]
        return [
            f"{names} have no batch axis: add it with x.unsqueeze(0), or pass cu_seqlens for packed"
            " documents [T, H, D]"
        ]
    return [
        f"{name} must be {sizes.layout(name)}, got {list(shapes[name])}"
        f"{_rank_hint(name, shapes, sizes)}"
        for name in wrong
    ]


def _rank_hint(name: str, shapes: Mapping[str, Shape], sizes: Sizes) -> str:
    """The fix for a tensor with one axis too few; "" if none is known."""
    shape, lead = shapes[name], 1 if sizes.packed else 2
    if len(shape) != lead + 1:
        return ""
    heads_missing = shape[:lead] == shapes["q"][:lead] or name == "q"
    if name == "gates" and heads_missing:
        if shape[-1] == 3 != shapes["q"][-2]:
            return f": for the same factors in all heads, pass gates.unsqueeze({lead})"
        if shape[-1] == 3 * shapes["q"][-2]:
            return f": pass gates.unflatten(-1, ({shapes['q'][-2]}, 3))"
        return (
            ": pass one factor per branch, for example torch.stack((g_cmp, g_sel, g_win), dim=-1)"
        )
    if not heads_missing:
        return ": add the batch axis with .unsqueeze(0)"
    if name == "blocks" or (name != "q" and shape[-1] == shapes["q"][-1]):
        return f": for a single head, pass {name}.unsqueeze({lead})"
    symbols = sizes.axes(name)[-2:]
    required = [sizes.required(symbol) or symbol for symbol in symbols]
    return f": pass {name}.unflatten(-1, ({', '.join(map(str, required))}))"


def _gates_errors(shapes: dict[str, Shape], sizes: Sizes) -> tuple[list[str], dict[str, Shape]]:
    """Find the axis of the three factors at another place of the gates, and correct it."""
    gates, q = shapes["gates"], shapes["q"]
    if gates[-1] == 3:
        return [], shapes
    for axis, call in ((-2, "transpose(-1, -2)"), (0, "movedim(0, -1)")):
        rest = list(gates)
        if rest.pop(axis) == 3 and tuple(rest) == q[:-1]:
            shapes["gates"] = (*rest, 3)
            layout = sizes.layout("gates")
            return [f"gates must be {layout}, got {list(gates)}: pass gates.{call}"], shapes
    return [], shapes


def _layout_error(shapes: dict[str, Shape], sizes: Sizes) -> tuple[str | None, dict[str, Shape]]:
    """Find the tensors of layout [B, H, S, D], and transpose them.

    Returns:
        One sentence for all of them, or None if there are none, and the transposed shapes.
    """
    arguments = list(dict.fromkeys(map(argument, shapes)))

    def transposed(chosen: Iterable[str]) -> dict[str, Shape]:
        return {
            name: (*s[:-3], s[-2], s[-3], s[-1]) if argument(name) in chosen else s
            for name, s in shapes.items()
        }

    before = len(_size_errors(shapes, sizes))
    if not before:
        return None, shapes
    best: tuple[int, int, int] = (before, 1, 0)
    chosen: tuple[str, ...] = ()
    for count in range(1, len(arguments) + 1):
        for subset in itertools.combinations(arguments, count):
            reading = transposed(subset)
            after = len(_size_errors(reading, sizes))
            explains = after == 0 or after <= before - 2
            # Of equally good readings, that with more tokens: sequences are longer than heads.
            score = (after, -reading["q"][-3], count)
            if explains and score < best:
                best, chosen = score, subset
    if not chosen:
        return None, shapes
    axes, layout = ("(0, 1)", "[H, T, D]") if sizes.packed else ("(1, 2)", "[B, H, S, D]")
    if len(chosen) == 1:  # gates end with 3, blocks with n
        layout = layout.replace("D]", {"gates": "3]", "blocks": "n]"}.get(chosen[0], "D]"))
    calls = [
        f"{a}.transpose{axes}" if a in shapes else f"[x.transpose{axes} for x in {a}]"
        for a in chosen
    ]
    look = "look" if _plural(chosen) else "looks"
    return f"{joined(chosen)} {look} like {layout}: pass {joined(calls)}", transposed(chosen)


def _size_errors(shapes: Mapping[str, Shape], sizes: Sizes) -> list[str]:
    """Errors of tensors with a wrong size along an axis, one sentence per axis and size."""
    holders: dict[str, dict[str, int]] = {}
    for name, shape in shapes.items():
        for symbol, size in zip(sizes.axes(name), shape):
            holders.setdefault(symbol, {})[name] = size
    errors: list[str] = []
    agreed: dict[str, int] = {}
    for symbol in ("B", "S", "Hq", "G", "Dk", "Dv", "3"):
        if symbol in holders:
            required = sizes.required(symbol)
            agreed[symbol] = _reference(holders[symbol]) if required is None else required
            errors += _axis_errors(symbol, holders[symbol], agreed, sizes)
    if "n_c" in holders:
        errors += _compressed_errors(holders["n_c"], agreed["S"], sizes)
    heads, groups = agreed["Hq"], agreed["G"]
    if not errors and sizes.config is None and (groups == 0 or heads % groups):
        errors.append(
            f"q has {heads} heads and k has {groups}: the number of query heads must be a multiple"
            " of the number of key/value heads"
        )
    return errors


def _reference(holders: Mapping[str, int]) -> int:
    """The size of most arguments; in a tie, that of q or else of the first."""
    counts: Counter[int] = Counter()
    for _, size in dict.fromkeys((argument(name), size) for name, size in holders.items()):
        counts[size] += 1
    most = max(counts.values())
    return next(size for size in holders.values() if counts[size] == most)


def _axis_errors(
    symbol: str, holders: Mapping[str, int], agreed: Mapping[str, int], sizes: Sizes
) -> list[str]:
    """Errors of the tensors whose size along the axis ``symbol`` differs from the agreed size."""
    size, required = agreed[symbol], sizes.required(symbol)
    wrong: dict[int, list[str]] = {}
    for name, holder_size in holders.items():
        if holder_size != size:
            wrong.setdefault(holder_size, []).append(name)
    errors = []
    for other, names in wrong.items():
        right = [name for name in holders if holders[name] == size]
        fix = _axis_fix(symbol, names, other, agreed, len(names) == len(holders), sizes)
        if symbol == "3":
            errors.append(
                f"gates must be {sizes.layout('gates')} with a factor for each of cmp, sel and win,"
                f" got {other} factors"
            )
        elif required is not None:
            text = f"{sizes.source}.{_FIELDS[symbol]} is {size}"
            errors.append(f"{_have(names)} {_described(symbol, other, sizes)}, but {text}{fix}")
        else:
            text = f"{_have(right)} {_described(symbol, size, sizes)}"
            errors.append(f"{_have(names)} {_described(symbol, other, sizes)}, but {text}{fix}")
    return errors


def _described(symbol: str, size: int, sizes: Sizes) -> str:
    """Return a size along an axis in words, for example "4 heads"."""
    if symbol in ("Dk", "Dv"):
        return f"heads of width {size}"
    if symbol == "B":
        return f"batch size {size}"
    if symbol == "S" and sizes.packed:
        return f"{size} rows"
    word = {"S": "token", "Hq": "query head", "G": "key/value head"}[symbol]
    return f"{size} {word}{'s' * (size != 1)}"


def _axis_fix(
    symbol: str,
    names: Sequence[str],
    size: int,
    agreed: Mapping[str, int],
    all_agree: bool,
    sizes: Sizes,
) -> str:
    """The fix for tensors of ``size`` along the axis ``symbol``; "" if none is known."""
    if symbol == "B" and size == 1:
        return ": pass " + joined([f"{n}.expand({agreed['B']}, -1, -1, -1)" for n in names])
    if symbol == "S" and set(map(argument, names)) <= {"k", "v"} and len(names) > 1:
        return (
            ": NSA is self-attention, with one key and value per query; to continue a sequence, use"
            " NSAttention with a cache"
        )
    if symbol in _FIELDS and sizes.config is not None and all_agree:
        values = f"{_FIELDS[symbol]}={size}"
        if symbol == "G" and size == agreed["Hq"]:
            return (
                f": pass a config with {values}, or keys and values that the query heads of a group"
                " share"
            )
        return f": pass a config with {values}"
    return ""


def _compressed_errors(holders: Mapping[str, int], tokens: int, sizes: Sizes) -> list[str]:
    """Errors of k_cmp and v_cmp with a wrong number of compressed tokens."""
    geometry = sizes.geometry
    rows = geometry.max_compressed(tokens) if sizes.packed else geometry.num_compressed(tokens)
    rule = (
        f"T // d = {rows}, d = compress_stride = {geometry.compress_stride}"
        if sizes.packed
        else f"{rows} for blocks of {geometry.compress_block_size} tokens every"
        f" {geometry.compress_stride}"
    )
    errors = []
    for size in dict.fromkeys(size for size in holders.values() if size != rows):
        names = [name for name, other in holders.items() if other == size]
        errors.append(f"{_have(names)} {size} compressed tokens, but {tokens} tokens have {rule}")
    return errors


def dtype_errors(tensors: Mapping[str, TensorOrMetadata]) -> list[str]:
    """Return one sentence per cause if the dtypes do not fit each other; [] if they do."""
    floats = {n: t.dtype for n, t in tensors.items() if n not in ("gates", "blocks")}
    counts = Counter(floats.values())
    dtype = max(floats.values(), key=lambda d: (counts[d], d == floats["q"]))
    errors = []
    if dtype not in _FLOATS:
        names = [n for n, d in floats.items() if d == dtype]
        return [
            f"{_be(names)} {dtype_name(dtype)}: pass bfloat16, float16, float32 or float64 tensors"
        ]
    for other in dict.fromkeys(d for d in floats.values() if d != dtype):
        names = [n for n, d in floats.items() if d == other]
        right = [n for n, d in floats.items() if d == dtype]
        errors.append(
            f"{_be(names)} {dtype_name(other)}, but {_be(right)} {dtype_name(dtype)}: pass"
            f" {joined([f'{n}.to({dtype})' for n in names])}"
        )
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    if tensors["gates"].dtype != stats:
        errors.append(
            f"gates must be {dtype_name(stats)} beside {dtype_name(dtype)} inputs, got"
            f" {dtype_name(tensors['gates'].dtype)}: pass gates.to({stats})"
        )
    return errors


def device_errors(tensors: Mapping[str, TensorOrMetadata]) -> list[str]:
    """Return one sentence per wrong device; [] if all tensors are on one device."""
    devices = {n: t.device for n, t in tensors.items()}
    counts = Counter(devices.values())
    device = max(devices.values(), key=lambda d: (counts[d], d == devices["q"]))
    errors = []
    for other in dict.fromkeys(d for d in devices.values() if d != device):
        names = [n for n, d in devices.items() if d == other]
        right = [n for n, d in devices.items() if d == device]
        errors.append(
            f"{_be(names)} on {other}, but {_be(right)} on {device}: pass"
            f" {joined([f'{n}.to({str(device)!r})' for n in names])}"
        )
    return errors
