"""JSON of a stranger: plain numbers, few levels, and fields of the annotated types."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from nsa_core.errors import InvalidInput
from nsa_core.limits import shown

Class = TypeVar("Class")
_DEPTH = 16


def parse(text: str, digits: int = 18) -> Any:
    """Return the value of a JSON text.

    Args:
        text: The text.
        digits: The most digits of an integer; the sign counts.

    Raises:
        ValueError: The text is not JSON, an integer has more digits, a number is not finite, or the
            values are nested more than 16 levels deep.
    """

    def integer(text: str) -> int:
        if len(text) > digits:
            raise ValueError(f"the integer {text:.20}... has more than {digits} digits")
        return int(text)

    try:
        value = json.loads(text, parse_int=integer, parse_float=_float, parse_constant=_float)
    except RecursionError:
        raise ValueError("the values are nested too deep") from None
    level = [value]
    for _ in range(_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise ValueError(f"the values are nested more than {_DEPTH} levels deep")
    return value


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is not a finite number")
    return value


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def problems(fields: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each value of another type than its field.

    Args:
        fields: The type of each field, as :func:`typing.get_type_hints` returns it.
        values: JSON values; those of other names are not checked.
    """
    return [
        f"{name} must be {_described(kind)}, got {shown(values[name])}"
        for name, kind in fields.items()
        if name in values and not _fits(values[name], kind)
    ]


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, arguments[0]) for one in value)
    if origin is dict or dataclasses.is_dataclass(kind):
        kind_of_value = arguments[1] if arguments else Any
        return isinstance(value, dict) and all(_fits(v, kind_of_value) for v in value.values())
    if kind is float:
        return type(value) in (int, float)
    return kind is Any or type(value) is kind


def _described(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "a JSON object"
    arguments = [_described(one) for one in typing.get_args(kind)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(arguments)
    if typing.get_origin(kind) is list:
        return f"a list of {arguments[0]}"
    if typing.get_origin(kind) is dict:
        return "a JSON object" + f" of {arguments[1]}" * (arguments[1] != "any value")
    return _WORDS[kind]


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    Any: "any value",
}


def build(cls: type[Class], values: Any, where: str) -> Class:
    """Return an object of a data class from JSON values; fields may be data classes too.

    Args:
        cls: The class.
        values: The values of its fields.
        where: Their place, for errors.

    Raises:
        InvalidInput: A field is missing, unknown, of another type or out of range; the message
            names all fields that are wrong.
    """
    if not isinstance(values, dict):
        raise InvalidInput(f"{where} must be a JSON object, got {shown(values)}")
    kinds = typing.get_type_hints(cls)
    wrong = [f"{name} is missing" for name in kinds.keys() - values.keys()]
    wrong += [f"{name!r:.60} is unknown" for name in values.keys() - kinds.keys()]
    wrong += problems(kinds, values)
    if wrong:
        raise InvalidInput(f"{where}: {'; '.join(sorted(wrong)[:4])}")
    built = dict(values)
    for name, kind in kinds.items():
        if kind is float:  # JSON may have an integer
            built[name] = float(values[name])
        of_class = [one for one in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(one)]
        if of_class and values[name] is not None:
            built[name] = build(of_class[0], values[name], f"{where}.{name}")  # type: ignore[arg-type]
    try:
        return cls(**built)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error
