"""Read the line of a generated case or of a generated decode step."""

from __future__ import annotations

from nsa_core.errors import InvalidInput
from nsa_verify.generated.case import GeneratedCase
from nsa_verify.generated.line import read_line
from nsa_verify.generated.step import GeneratedStep


def parse_case(text: str) -> GeneratedCase | GeneratedStep:
    """Parse the line that ``text()`` of a generated case or step writes.

    A line with ``slot`` is a case, one with ``phase=decode`` a decode step.

    Raises:
        InvalidInput: A pair is not ``name=value``, a name is unknown or occurs twice, a value is
            invalid, the slot is missing, or the sizes do not fit together.

    Example:
        >>> parse_case("slot=win,w=3,tokens=5").w
        3
    """
    pairs: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise InvalidInput(
                f"case must be name=value pairs such as slot=sel,l=8,tokens=20, got {item!r} in"
                f" {text!r}"
            )
        if name in pairs:
            raise InvalidInput(f"case names {name} twice in {text!r}")
        pairs[name] = value
    if "phase" in pairs and "slot" not in pairs:
        return read_line(GeneratedStep, pairs)
    if "slot" not in pairs or "phase" in pairs:
        raise InvalidInput(
            "case must have either a slot, such as slot=sel, or phase=decode for a decode step, got"
            f" {text!r}"
        )
    if "documents" in pairs and ("tokens" in pairs or "batch" in pairs):
        raise InvalidInput("case: documents are packed; leave tokens and batch out")
    return read_line(GeneratedCase, pairs)
