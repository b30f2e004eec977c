"""Read the machine code (SASS) of a compiled kernel, for faults that only the binary shows.

    lost_descriptors(disassemble(compile_launch(launch).asm["cubin"]))

The ptxas of CUDA 12.8, which Triton 3.6 brings, translates some matrix products of sm_90 (HGMMA)
with the address of a tile in a register that holds something else: the product then reads outside
shared memory. The PTX is right, and the ptxas of CUDA 12.9 translates it correctly.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z0-9_.]+)\s*([^;]*);")
_REGISTER = re.compile(r"-?UR(\d+)")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_COPY = ("UIADD3", "UMOV")  # copy a descriptor, or add a constant to it
# Make the low register of a descriptor: the low 14 bits of (address >> 4), or a constant.
_MAKE = ("USGXT", "ULOP3", "R2UR", *_COPY)


class Instruction(NamedTuple):
    """One machine instruction: its address, name and operands; whether a predicate guards it."""

    address: int
    guarded: bool
    name: str
    operands: tuple[str, ...]


def disassemble(cubin: bytes) -> list[Instruction]:
    """Return the instructions of the only kernel in ``cubin``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        Instruction(
            int(match[1], 16),
            bool(match[2]),
            match[3],
            tuple(operand.strip() for operand in match[4].split(",")),
        )
        for match in _LINE.finditer(text)
    ]


def lost_descriptors(code: Sequence[Instruction]) -> list[str]:
    """Return the matrix products of sm_90 whose descriptor is not the address of a tile.

    A descriptor is two registers. The low one must come, through additions of constants, from an
    address cut to 14 bits. The other origins that the fault leaves there are parameters of the
    kernel (ULDC), products for pointers (UIMAD, ULEA, USHF), or nothing at all.

    Returns:
        A line per product, such as "0x4560 UR18: USHF.L.U32 UR18, UR18, 0x1, URZ".
    """
    lost = []
    before = _predecessors(code)
    for index, product in enumerate(code):
        if not product.name.startswith("HGMMA"):
            continue
        for register in _descriptors(product):
            for origin in _origins(code, before, index, register):
                if not origin.startswith(_MAKE):
                    lost.append(f"{product.address:#x} UR{register}: {origin}")
    return lost


def _descriptors(product: Instruction) -> Iterator[int]:
    """Yield the low registers of the descriptors of A, unless it lies in registers, and of B."""
    for operand in product.operands:
        if match := _DESCRIPTOR.match(operand):
            first = int(match[1])
            if product.operands[1].startswith("gdesc"):
                yield first
            yield first + 2


def _predecessors(code: Sequence[Instruction]) -> list[list[int]]:
    """Return, for each instruction, those that can run just before it."""
    at = {instruction.address: index for index, instruction in enumerate(code)}
    before: list[list[int]] = [[] for _ in code]
    for index, instruction in enumerate(code):
        conditional = instruction.guarded or re.match(r"!?U?P\d", instruction.operands[0])
        if instruction.name.startswith("BRA"):
            target = at.get(int(instruction.operands[-1], 16))
            if target is not None:
                before[target].append(index)
        elif instruction.name != "EXIT":
            conditional = True  # every other instruction goes on to the next one
        if conditional and index + 1 < len(code):
            before[index + 1].append(index)
    return before


def _writes(instruction: Instruction, register: int) -> bool:
    match = _REGISTER.fullmatch(instruction.operands[0])
    if match is None:
        return False
    name = instruction.name
    pair = "WIDE" in name or (".64" in name and not name.startswith("USHF"))
    return int(match[1]) <= register <= int(match[1]) + pair


def _writers(
    code: Sequence[Instruction], before: Sequence[Sequence[int]], index: int, register: int
) -> list[int]:
    """Return the instructions whose value of ``register`` can reach instruction ``index``."""
    seen: set[int] = set()
    pending, writers = list(before[index]), []
    while pending:
        candidate = pending.pop()
        if candidate in seen:
            continue
        seen.add(candidate)
        if _writes(code[candidate], register):
            writers.append(candidate)
            if not code[candidate].guarded:
                continue
        pending += before[candidate]
    return writers


def _origins(
    code: Sequence[Instruction], before: Sequence[Sequence[int]], index: int, register: int
) -> set[str]:
    """Return the instructions that make the value of ``register``, past copies and additions."""
    origins: set[str] = set()
    seen: set[tuple[int, int]] = set()
    pending = [(index, register)]
    while pending:
        place = pending.pop()
        if place in seen:
            continue
        seen.add(place)
        writers = _writers(code, before, *place)
        if not writers:
            origins.add("never written")
        for writer in writers:
            name, operands = code[writer].name, code[writer].operands
            shift = place[1] - int(operands[0][2:])  # 1 in the upper half of a pair
            sources = [m for m in map(_REGISTER.fullmatch, operands[1:]) if m]
            if name.startswith(_COPY) and sources:
                pending += [(writer, int(source[1]) + shift) for source in sources]
            else:
                origins.add(f"{name} {', '.join(operands)}")
    return origins
