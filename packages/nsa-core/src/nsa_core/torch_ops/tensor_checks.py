"""One table of the tensors that each call takes, and the check of a call against it.

The check reads metadata only. It names the arguments that do not fit, their values, and the fix of
common mistakes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.dtypes import FLOATING, QUANTIZED, dtype_name, stats_dtype
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.autograd import is_unobserved
from nsa_core.torch_ops.torch_state import checks_values

Value = TypeVar("Value")


class Metadata(NamedTuple):
    """The properties of a tensor that the checks read; hashable, so that results can be cached."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Metadata:
        """Return the metadata of ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device)


TensorOrMetadata: TypeAlias = torch.Tensor | Metadata


class Argument(NamedTuple):
    """A tensor argument of a call.

    Attributes:
        axes: The symbols of its axes. Equal symbols have equal sizes. Packed tensors have no axis
            B. N are the keys of S queries, and C the compressed tokens of N keys.
        dtype: "float": the floating dtype that all such arguments share. "stats": float64 beside
            float64 tensors, else float32. "pages": that of "float", or one of QUANTIZED. "integer":
            any integer dtype. "index": int32 or int64. "int32", "float32".
    """

    axes: tuple[str, ...]
    dtype: str = "float"


_Q = Argument(("B", "S", "Hq", "Dk"))
_K, _V = Argument(("B", "N", "G", "Dk")), Argument(("B", "N", "G", "Dv"))
_K_CMP, _V_CMP = Argument(("B", "C", "G", "Dk")), Argument(("B", "C", "G", "Dv"))
_O = Argument(("B", "S", "Hq", "Dv"))
_LSE = Argument(("B", "Hq", "S"), "stats")
_GATES = Argument(("B", "S", "Hq", "3"), "stats")
_CHOICE = Argument(("B", "S", "G", "n"), "integer")
_K_CACHE, _V_CACHE = Argument(("P", "rows", "G", "Dk")), Argument(("P", "rows", "G", "Dv"))
_COUNTS = Argument(("B",), "int32")

# call -> its tensor arguments in order. The slots are the operators of backends.
CALLS: dict[str, dict[str, Argument]] = {
    "cmp": {"q": _Q, "k_cmp": _K_CMP, "v_cmp": _V_CMP},
    "select": {"q": _Q, "k_cmp": _K_CMP, "lse": _LSE},
    "sel": {"q": _Q, "k": _K, "v": _V, "blocks": Argument(_CHOICE.axes, "index")},
    "win": {"q": _Q, "k": _K, "v": _V},
    "combine": {"gates": _GATES, "o_cmp": _O, "o_sel": _O, "o_win": _O},
    "nsa_attention": {
        "q": _Q,
        "k": _K,
        "v": _V,
        "gates": _GATES,
        "k_cmp": _K_CMP,
        "v_cmp": _V_CMP,
        "blocks": _CHOICE,
    },
    "block_attention": {"q": _Q, "k": _K, "v": _V, "blocks": _CHOICE},
    "block_attention_decode": {
        "q": _Q,
        "k": _K_CACHE,
        "v": _V_CACHE,
        "blocks": _CHOICE,
        "lengths": _COUNTS,
        "starts": _COUNTS,
        "block_table": Argument(("B", "pages"), "int32"),
    },
    "nsa_decode": {
        "q": Argument(("T", "Hq", "Dk")),
        "k": Argument(("T", "G", "Dk")),
        "v": Argument(("T", "G", "Dv")),
        "gates": Argument(("T", "Hq", "3"), "stats"),
        **{
            f"rows.{name}": Argument(("T",), "int32") for name in ("sequences", "starts", "lengths")
        },
        **{
            f"pages.{branch}.{name}": Argument(
                (f"P_{branch}", f"page_{branch}", "G", width),
                "float" if branch == "raw" else "pages",
            )
            for branch in ("cmp", "sel", "win", "raw")
            for name, width in (("k", "Dk"), ("v", "Dv"))
        },
        **{
            f"pages.{branch}.table": Argument(("sequences", f"columns_{branch}"), "int32")
            for branch in ("cmp", "sel", "win", "raw")
        },
        **{
            f"pages.{branch}.scales": Argument((f"P_{branch}", "G", "2"), "float32")
            for branch in ("cmp", "sel", "win", "raw")
        },
        "rope.cos": Argument(("positions", "Dk / 2"), "stats"),
        "rope.sin": Argument(("positions", "Dk / 2"), "stats"),
    },
}

_FIELDS = {"Hq": "n_heads", "G": "n_kv_heads", "Dk": "head_dim", "Dv": "v_head_dim"}
_WORDS = {
    "S": "token",
    "Hq": "query head",
    "G": "key/value head",
    "N": "row",
    "rows": "row",
    "P": "page",
    "C": "compressed token",
    "T": "row",
    "sequences": "row",
    "positions": "position",
    "Dk / 2": "column",
    "2": "scale",
    **{f"P_{branch}": "page" for branch in ("cmp", "sel", "win", "raw")},
    **{f"page_{branch}": "row" for branch in ("cmp", "sel", "win", "raw")},
}


class Sizes(NamedTuple):
    """The sizes that the tensors of a call must have.

    Attributes:
        packed: Whether the tensors are packed documents, without the axis B.
        config: The config of the call; None: head counts and widths need only fit each other.
        source: The name of ``config`` in messages, "config" or "plan.config".
        geometry: The block sizes; None: those of ``config``, and without it the number of
            compressed tokens is not checked.
        first_query: The position of row 0 of q in its sequence; None: whole sequences, which have
            as many keys as queries.
    """

    packed: bool = False
    config: NSAConfig | None = None
    source: str = "config"
    geometry: BlockGeometry | None = None
    first_query: int | None = None


class _Call(NamedTuple):
    """The name of a call, its tensors by name, and the sizes that they must have."""

    name: str
    tensors: Mapping[str, TensorOrMetadata]
    sizes: Sizes


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def raise_problems(problems: Sequence[str], tensors: Mapping[str, TensorOrMetadata]) -> None:
    """Raise InvalidInput with ``problems``, if there are any, and the metadata of the tensors."""
    if problems:
        raise InvalidInput("; ".join(problems) + f" ({describe(tensors)})")


def describe(tensors: Mapping[str, TensorOrMetadata]) -> str:
    """Return the name, shape, dtype and device of each tensor, for error messages."""
    return ", ".join(
        f"{n} {list(t.shape)} {dtype_name(t.dtype)} {t.device}" for n, t in tensors.items()
    )


def call_problems(call: str, tensors: Mapping[str, TensorOrMetadata], sizes: Sizes) -> list[str]:
    """Return a sentence per problem of the metadata of a call's tensors; [] if there are none.

    Args:
        call: A key of :data:`CALLS`.
        tensors: The tensors by name. The three tensors of an argument may be "k[cmp]", "k[sel]"
            and "k[win]".
        sizes: The sizes that they must have.
    """
    if torch.compiler.is_compiling():
        return _problems(_Call(call, tensors, sizes))
    metadata = tuple([(t.shape, t.dtype, t.device) for t in tensors.values()])
    return [*_cached_problems(call, tuple(tensors), metadata, sizes)]


@functools.lru_cache(maxsize=4096)
def _cached_problems(
    call: str, names: tuple[str, ...], metadata: tuple[tuple[Any, ...], ...], sizes: Sizes
) -> list[str]:
    """:func:`call_problems`; ``metadata`` has the fields of each tensor's Metadata."""
    tensors = {name: Metadata(*fields) for name, fields in zip(names, metadata)}
    return _problems(_Call(call, tensors, sizes))


def _problems(call: _Call) -> list[str]:
    shapes = {name: tuple(tensor.shape) for name, tensor in call.tensors.items()}
    problems = _rank_problems(call, shapes)
    if not problems:
        problems = _size_problems(call, shapes)
        if problems:
            problems = _mistakes(call, shapes, problems)
    return problems + _dtype_problems(call) + _device_problems(call)


def _argument(call: _Call, name: str) -> Argument:
    return CALLS[call.name][argument_of(name)]


def argument_of(name: str) -> str:
    """Return the argument that holds the tensor ``name``: "k" for "k[sel]"."""
    return name.partition("[")[0]


def _axes(call: _Call, name: str) -> tuple[str, ...]:
    """Return the symbols of the axes of a tensor in this call."""
    symbols = _argument(call, name).axes
    if call.sizes.packed:
        symbols = symbols[1:]
    if call.sizes.first_query is None:
        symbols = tuple(["S" if symbol == "N" else symbol for symbol in symbols])
    if "block_table" not in call.tensors:  # a contiguous cache has one page for each sequence
        symbols = tuple(["B" if symbol == "P" else symbol for symbol in symbols])
    return symbols


def _layout(call: _Call, name: str) -> str:
    """Return the layout of a tensor, for example "[B, S, Hq, Dk]"."""
    symbols = ["T" if s == "S" and call.sizes.packed else s for s in _axes(call, name)]
    return f"[{', '.join(symbols)}]"


def _required(call: _Call, symbol: str) -> int | None:
    """Return the size that ``symbol`` must have; None if the tensors need only agree."""
    if symbol.isdigit():
        return int(symbol)
    if call.sizes.config is None or symbol not in _FIELDS:
        return None
    size: int = getattr(call.sizes.config, _FIELDS[symbol])
    return size


def _geometry(call: _Call) -> BlockGeometry | None:
    config = call.sizes.config
    return call.sizes.geometry if config is None else config.geometry


def joined(names: Sequence[str]) -> str:
    """Return "q", "q and k" or "q, k and v"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _plural(names: Sequence[str]) -> bool:
    return len(names) > 1 or names[0] in ("gates", "blocks", "lengths", "starts")


def _be(names: Sequence[str]) -> str:
    return f"{joined(names)} {'are' if _plural(names) else 'is'}"


def _have(names: Sequence[str]) -> str:
    return f"{joined(names)} {'have' if _plural(names) else 'has'}"


def _agreed(values: Mapping[str, Value]) -> Value:
    """Return the value of most arguments; in a tie, the first one, which is that of q."""
    votes: list[tuple[str, Value]] = []  # not a set: a symbolic size has no hash up to torch 2.11
    for name, value in values.items():
        if (argument_of(name), value) not in votes:
            votes.append((argument_of(name), value))
    return max((value for _, value in votes), key=lambda v: sum(v == other for _, other in votes))


def _others(values: Mapping[str, Value], agreed: Value) -> list[tuple[Value, list[str]]]:
    """Return each value but ``agreed``, with the names of the tensors that have it."""
    others: list[tuple[Value, list[str]]] = []
    for name, value in values.items():
        names = next((names for other, names in others if other == value), None)
        if names is not None:
            names.append(name)
        elif value != agreed:
            others.append((value, [name]))
    return others


def _rank_problems(call: _Call, shapes: Shapes) -> list[str]:
    """Return the problems of tensors with a wrong number of axes."""
    excess = {name: len(shape) - len(_axes(call, name)) for name, shape in shapes.items()}
    wrong = [name for name, count in excess.items() if count]
    if not wrong:
        return []
    names = joined(list(shapes))
    if call.sizes.packed and all(count == 1 for count in excess.values()):
        return [
            f"{names} have a batch axis, but cu_seqlens is passed: pass packed documents"
            " [T, H, D] (nsa_core.unpad packs a padded batch), or leave out cu_seqlens"
        ]
    if not call.sizes.packed and all(count == -1 for count in excess.values()):
        return [
            f"{names} have no batch axis: add it with x.unsqueeze(0), or pass cu_seqlens for packed"
            " documents [T, H, D]"
        ]
    return [
        f"{name} must be {_layout(call, name)}, got {list(shapes[name])}"
        f"{_rank_fix(call, name, shapes)}"
        for name in wrong
    ]


def _rank_fix(call: _Call, name: str, shapes: Shapes) -> str:
    """Return the fix of a tensor with one axis too few; "" if none is known."""
    shape, axes = shapes[name], _axes(call, name)
    lead = len(axes) - 2
    if len(shape) != len(axes) - 1 or "q" not in shapes or axes[-2:-1] not in (("Hq",), ("G",)):
        return ""
    q = shapes["q"]
    others = [s for n, s in shapes.items() if len(s) == len(_axes(call, n)) == len(axes)]
    if others and shape[:lead] != others[0][:lead]:
        return ": add the batch axis with .unsqueeze(0)"
    if name == "gates":
        if shape[-1] == 3 != q[-2]:
            return f": for the same factors in all heads, pass gates.unsqueeze({lead})"
        if shape[-1] == 3 * q[-2]:
            return f": pass gates.unflatten(-1, ({q[-2]}, 3))"
        return (
            ": pass one factor per branch, for example torch.stack((g_cmp, g_sel, g_win), dim=-1)"
        )
    if name == "blocks" or (name != "q" and shape[-1] == q[-1]):
        return f": for a single head, pass {name}.unsqueeze({lead})"
    sizes = [_required(call, symbol) or symbol for symbol in axes[-2:]]
    return f": pass {name}.unflatten(-1, ({', '.join(map(str, sizes))}))"


def _size_problems(call: _Call, shapes: Shapes) -> list[str]:
    """Return the problems of the sizes along the axes, one sentence per axis and wrong size."""
    holders: dict[str, dict[str, int]] = {}
    for name, shape in shapes.items():
        for symbol, size in zip(_axes(call, name), shape):
            holders.setdefault(symbol, {})[name] = size
    problems, agreed = [], {}
    exact = _geometry(call) is not None and call.sizes.first_query is None  # the number C is known
    for symbol, of_names in holders.items():
        required = _required(call, symbol)
        agreed[symbol] = next(iter(of_names.values())) if required is None else required
        for size in of_names.values():
            if size != agreed[symbol] and not (symbol == "C" and exact):
                agreed[symbol] = _agreed(of_names) if required is None else required
                problems += _axis_problems(call, symbol, of_names, agreed)
                break
    problems += _row_problems(call, holders, agreed)
    heads, groups = agreed.get("Hq", 0), agreed.get("G", 1)
    if not problems and call.sizes.config is None and (groups == 0 or heads % groups):
        problems.append(
            f"q has {heads} heads and {next(iter(holders['G']))} has {groups}: the number of query"
            " heads must be a multiple of the number of key/value heads"
        )
    return problems


def _axis_problems(
    call: _Call, symbol: str, of_names: Mapping[str, int], agreed: Mapping[str, int]
) -> list[str]:
    """Return the problems of the tensors whose size along the axis ``symbol`` is not the agreed."""
    size, required = agreed[symbol], _required(call, symbol)
    right = [name for name in of_names if of_names[name] == size]
    expected = f"{_have(right)} {_in_words(call, symbol, size)}" if right else ""
    if required is not None and symbol in _FIELDS:
        expected = f"{call.sizes.source}.{_FIELDS[symbol]} is {size}"
    problems = []
    for other, names in _others(of_names, size):
        if symbol.isdigit():
            kind, of = ("factor", "cmp, sel and win") if symbol == "3" else ("scale", "k and v")
            problems.append(
                f"{joined(names)} must be {_layout(call, names[0])} with a {kind} for each of {of},"
                f" got {other} {kind}s"
            )
            continue
        fix = _axis_fix(call, symbol, names, other, agreed, len(names) == len(of_names))
        actual = f"{_have(names)} {_in_words(call, symbol, other)}"
        problems.append(f"{actual}, but {expected}{fix}")
    return problems


def _in_words(call: _Call, symbol: str, size: int) -> str:
    """Return a size along an axis in words, for example "4 query heads"."""
    if symbol in ("Dk", "Dv"):
        return f"heads of width {size}"
    if symbol == "B":
        return f"batch size {size}"
    word = "row" if symbol == "S" and call.sizes.packed else _WORDS[symbol]
    return f"{size} {word}{'s' * (size != 1)}"


def _axis_fix(
    call: _Call,
    symbol: str,
    names: Sequence[str],
    size: int,
    agreed: Mapping[str, int],
    all_wrong: bool,
) -> str:
    """Return the fix of tensors of ``size`` along the axis ``symbol``; "" if none is known."""
    if symbol == "B" and size == 1 and all(len(_axes(call, name)) > 2 for name in names):
        calls = [
            f"{name}.expand({agreed['B']}{', -1' * (len(_axes(call, name)) - 1)})" for name in names
        ]
        return ": pass " + joined(calls)
    if symbol == "S" and {argument_of(name) for name in names} == {"k", "v"}:
        if call.name == "nsa_attention":
            return (
                ": NSA is self-attention, with one key and value per query; to continue a sequence,"
                " use NSAttention with a cache"
            )
        return ": pass first_query, the position of the first row of q among the keys"
    if symbol in _FIELDS and call.sizes.config is not None and all_wrong and size:
        values = f"{_FIELDS[symbol]}={size}"
        if symbol == "G" and size == agreed["Hq"]:
            return (
                f": pass a config with {values}, or keys and values that the query heads of a group"
                " share"
            )
        return f": pass a config with {values}"
    return ""


def _row_problems(
    call: _Call, holders: Mapping[str, Mapping[str, int]], agreed: Mapping[str, int]
) -> list[str]:
    """Return the problems of the number of keys N and of compressed tokens C."""
    first, geometry = call.sizes.first_query, _geometry(call)
    if first is not None and first < 0:
        return [f"first_query must be >= 0, got {first}"]
    problems = []
    for symbol in ("N", "C"):
        if symbol not in holders or (symbol == "C" and geometry is None):
            continue
        needed = length = agreed["S"] + (first or 0)
        if symbol == "C" and geometry is not None:
            count = geometry.max_compressed if call.sizes.packed else geometry.num_compressed
            needed = count(length)
        wrong: dict[int, list[str]] = {}
        for name, size in holders[symbol].items():
            if size < needed or (first is None and size != needed):
                wrong.setdefault(size, []).append(name)
        for size, names in wrong.items():
            rule = _row_rule(call, geometry, agreed["S"], needed)
            problems.append(f"{_have(names)} {_in_words(call, symbol, size)}, but {rule}")
    return problems


def _row_rule(call: _Call, geometry: BlockGeometry | None, rows: int, needed: int) -> str:
    """Return how many keys or compressed tokens the ``rows`` rows of q need."""
    if call.sizes.first_query is not None:
        start = f"first_query = {call.sizes.first_query}"
        return f"the {rows} rows of q from {start} on need at least {needed}"
    assert geometry is not None  # whole sequences have as many keys as queries
    size, stride = geometry.compress_block_size, geometry.compress_stride
    if call.sizes.packed:
        return f"{rows} tokens have T // d = {needed}, d = compress_stride = {stride}"
    return f"{rows} tokens have {needed} for blocks of {size} tokens every {stride}"


def _mistakes(call: _Call, shapes: Shapes, problems: list[str]) -> list[str]:
    """Return ``problems``, or a sentence per tensor of another layout and what is wrong besides."""
    mistakes, corrected = [], dict(shapes)
    for correct in (_factors_last, _tokens_first):
        if sentence := correct(call, corrected):
            mistakes.append(sentence)
    return [*mistakes, *_size_problems(call, corrected)] if mistakes else problems


def _factors_last(call: _Call, shapes: dict[str, tuple[int, ...]]) -> str:
    """Correct gates with the axis of the three factors at another place, and return the fix."""
    if "gates" not in shapes or "q" not in shapes or shapes["gates"][-1] == 3:
        return ""
    gates = shapes["gates"]
    for axis, fix in ((-2, "transpose(-1, -2)"), (0, "movedim(0, -1)")):
        rest = list(gates)
        if rest.pop(axis) == 3 and tuple(rest) == shapes["q"][:-1]:
            shapes["gates"] = (*rest, 3)
            return f"gates must be {_layout(call, 'gates')}, got {list(gates)}: pass gates.{fix}"
    return ""


def _tokens_first(call: _Call, shapes: dict[str, tuple[int, ...]]) -> str:
    """Transpose the shapes of tensors of layout [B, H, S, D], and return the fix.

    The number of tokens is the largest size that every tensor has on one of these two axes.
    """
    heads_and_tokens = {
        name: shape[-3:-1] for name, shape in shapes.items() if _axes(call, name)[-3:-2] == ("S",)
    }
    if not heads_and_tokens:
        return ""
    common = set.intersection(*map(set, heads_and_tokens.values()))
    tokens = max(common, default=None)
    swapped = [n for n, (first, second) in heads_and_tokens.items() if first != tokens == second]
    transposed = {n: (*s[:-3], s[-2], s[-3], s[-1]) for n, s in shapes.items() if n in swapped}
    before = len(_size_problems(call, shapes))
    if not swapped or len(_size_problems(call, {**shapes, **transposed})) >= before:
        return ""
    shapes.update(transposed)
    packed, names = call.sizes.packed, list(dict.fromkeys(map(argument_of, swapped)))
    axes, layout = ("(0, 1)", "[H, T, D]") if packed else ("(1, 2)", "[B, H, S, D]")
    if len(names) == 1:  # gates end with 3, blocks with n
        layout = layout.replace("D]", {"gates": "3]", "blocks": "n]"}.get(names[0], "D]"))
    fixes = [
        f"{name}.transpose{axes}" if name in shapes else f"[x.transpose{axes} for x in {name}]"
        for name in names
    ]
    look = "look" if _plural(names) else "looks"
    return f"{joined(names)} {look} like {layout}: pass {joined(fixes)}"


def _dtype_problems(call: _Call) -> list[str]:
    """Return the problems of dtypes. Nothing is cast silently."""
    kinds = {name: _argument(call, name).dtype for name in call.tensors}
    of_floats = {n: t.dtype for n, t in call.tensors.items() if kinds[n] in ("float", "pages")}
    floats = {n: x for n, x in of_floats.items() if kinds[n] == "float" or x not in QUANTIZED}
    dtype = next(iter(floats.values()))
    problems = []
    if any(other != dtype for other in floats.values()):
        dtype = _agreed(floats)
        right = [name for name in floats if floats[name] == dtype]
        for other, names in _others(floats, dtype):
            fixes = joined([f"{name}.to({dtype})" for name in names])
            problems.append(
                f"{_be(names)} {dtype_name(other)}, but {_be(right)} {dtype_name(dtype)}: pass"
                f" {fixes}"
            )
    if dtype not in FLOATING:
        return [
            f"{_be(list(floats))} {dtype_name(dtype)}: pass bfloat16, float16, float32 or float64"
            " tensors"
        ]
    for name, tensor in call.tensors.items():
        kind, actual = kinds[name], dtype_name(tensor.dtype)
        if kind == "stats" and tensor.dtype != stats_dtype(dtype):
            stats = stats_dtype(dtype)
            problems.append(
                f"{name} must be {dtype_name(stats)} beside {dtype_name(dtype)} inputs, got"
                f" {actual}: pass {name}.to({stats})"
            )
        if kind == "integer" and not _is_integer(tensor.dtype):
            problems.append(f"{name} must be integers, got {actual}")
        if kind == "index" and tensor.dtype not in (torch.int32, torch.int64):
            problems.append(f"{name} must be int32 or int64, got {actual}")
        if kind in ("int32", "float32") and actual != kind:
            cast = "int" if kind == "int32" else "float"
            problems.append(f"{name} must be {kind}, got {actual}: pass {name}.{cast}()")
    return problems


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _device_problems(call: _Call) -> list[str]:
    """Return a sentence per wrong device."""
    devices = {name: tensor.device for name, tensor in call.tensors.items()}
    device = next(iter(devices.values()))
    if all(other == device for other in devices.values()):
        return []
    device = _agreed(devices)
    right = [name for name in devices if devices[name] == device]
    return [
        f"{_be(names)} on {other}, but {_be(right)} on {device}: pass"
        f" {joined([f'{name}.to({str(device)!r})' for name in names])}"
        for other, names in _others(devices, device)
    ]


def check_slot(
    slot: str,
    tensors: Sequence[TensorOrMetadata],
    cu_seqlens: TensorOrMetadata | None,
    geometry: BlockGeometry,
    first_query: int | None = None,
) -> None:
    """Check the inputs of a slot against the contract, by metadata only.

    Args:
        slot: The slot.
        tensors: Its inputs in order.
        cu_seqlens: Document bounds; None if dense.
        geometry: The block sizes.
        first_query: Position of row 0 of q, for queries that begin inside a sequence; None: whole
            sequences.

    Raises:
        InvalidInput: An axis count, size, dtype or device does not fit. The message describes every
            tensor.
    """
    named = dict(zip(CALLS[slot], tensors))
    sizes = Sizes(cu_seqlens is not None, geometry=geometry, first_query=first_query)
    raise_problems(_problems(_Call(slot, named, sizes)), named)
    if cu_seqlens is not None and (
        cu_seqlens.dtype != torch.int32
        or len(cu_seqlens.shape) != 1
        or cu_seqlens.device != tensors[0].device
    ):
        raise InvalidInput(
            f"cu_seqlens must be int32 [documents + 1] on {tensors[0].device}, "
            f"got {dtype_name(cu_seqlens.dtype)} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )


def check_nonnegative(gates: torch.Tensor) -> None:
    """Check that no gate is negative, on the CPU, or with NSA_CHECK=1 on every device.

    Raises:
        InvalidInput: The message has the smallest gate.
    """
    if not checks_values(gates) or not gates.numel() or not is_unobserved(gates):
        return
    smallest = gates.detach().min().item()
    if smallest < 0:
        raise InvalidInput(
            f"nonnegative_gates is True, but the smallest of gates is {smallest:.3g}; leave it out"
        )
