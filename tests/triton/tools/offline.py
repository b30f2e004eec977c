"""Compile kernels for a GPU that is not present, from the launches that a call makes.

    with recording(90) as launches:
        combine.forward(gates, o_cmp, o_sel, o_win, call=call)  # tensors on the meta device
    cost(launches[0])  # shared memory, registers, spills

Does not work with TRITON_INTERPRET=1. Written against triton 3.6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature, native_specialize_impl

from nsa_backend_triton.host import device

# shared memory per block, in bytes
SHARED = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
}
_SERIALIZED = re.compile(
    r"\((C\d+)\) Potential Performance Loss: wgmma\.mma_async instructions are serialized"
)
_INSTRUCTIONS = re.compile(r"\b(wgmma\.mma_async|mma\.sync|cp\.async\.bulk|cp\.async\.cg)")
# position of an argument: (parameter,), or (parameter, element) inside a tuple
Place: TypeAlias = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RecordedLaunch:
    """One launch: a kernel and everything that determines its binary."""

    kernel: JITFunction
    architecture: int
    grid: tuple[int, ...]
    signature: dict[str, Any]  # parameter -> type, or a tuple of the types of a tuple's elements
    constexprs: dict[Place, Any]
    attributes: dict[Place, Any]
    options: Any

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    @property
    def binary(self) -> tuple[Any, ...]:
        """A key that is equal for launches of the same compiled code."""
        return (
            self.name,
            self.architecture,
            *((name, str(kind)) for name, kind in self.signature.items()),
            *((place, str(value)) for place, value in sorted(self.constexprs.items())),
            *((place, str(marks)) for place, marks in sorted(self.attributes.items())),
            str(self.options),
        )

    @property
    def digest(self) -> str:
        """A short digest of the tile shapes and all else that a call passes to the compiler.

        Unlike :attr:`binary`, it does not depend on triton's version or place.
        """
        arguments = (
            sorted((name, str(kind)) for name, kind in self.signature.items()),
            sorted((place, str(value)) for place, value in self.constexprs.items()),
            sorted((place, str(marks)) for place, marks in self.attributes.items()),
            (self.options.num_warps, self.options.num_stages, self.options.maxnreg),
        )
        return hashlib.sha256(repr(arguments).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Resources of a compiled kernel.

    Attributes:
        shared: shared memory per block, in bytes.
        registers: registers per thread.
        spills: spilled bytes per thread, stores and loads together.
        instructions: matrix and copy instructions.
        serialized: codes of ptxas warnings that it serializes asynchronous products (wgmma).
    """

    shared: int
    registers: int
    spills: int
    instructions: tuple[str, ...]
    serialized: tuple[str, ...]


@contextlib.contextmanager
def recording(architecture: int) -> Iterator[list[RecordedLaunch]]:
    """Collect launches inside the block, as for ``architecture``, in place of running them."""
    launches: list[RecordedLaunch] = []
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        packed = kernel._pack_args(backend, kwargs, bound, specialization, options)
        options, signature, constexprs, attributes = packed
        size = grid(bound) if callable(grid) else grid
        launches.append(
            RecordedLaunch(
                kernel, architecture, tuple(size), signature, constexprs, attributes, options
            )
        )

    with mock.patch.object(JITFunction, "run", run), device.described(architecture):
        yield launches


def _arguments(launch: RecordedLaunch) -> Iterator[tuple[str, Place, Any, str]]:
    """(label, place, parameter, type) of each argument; "stride_q[1]" is an element of a tuple."""
    for index, parameter in enumerate(launch.kernel.params):
        kind = launch.signature[parameter.name]
        if isinstance(kind, tuple):
            for i, element in enumerate(kind):
                yield f"{parameter.name}[{i}]", (index, i), parameter, element
        else:
            yield parameter.name, (index,), parameter, kind


def _specializes(place: Place, parameter: Any) -> bool:
    """Whether Triton specializes this argument; it ignores do_not_specialize inside a tuple."""
    return len(place) > 1 or not parameter.do_not_specialize


def specialized_integers(launch: RecordedLaunch) -> tuple[str, ...]:
    """Labels of the integer arguments that Triton specializes; one equal to 1 becomes a constant.

    The label of a parameter is its name, that of an element of a tuple is like "stride_q[1]".
    """
    return tuple(
        label
        for label, place, parameter, kind in _arguments(launch)
        if not parameter.is_constexpr
        and _specializes(place, parameter)
        and (type(launch.constexprs.get(place)) is int or kind in ("i32", "i64"))
    )


def with_values(launch: RecordedLaunch, values: Mapping[str, int]) -> RecordedLaunch:
    """Return ``launch`` with other integer arguments, specialized by Triton's own rules.

    Args:
        values: label (see specialized_integers) -> value. Only its specialization enters the
            binary: 1 becomes a constant, a multiple of 16 is marked as one.
    """
    backend = make_backend(GPUTarget("cuda", launch.architecture, 32))
    signature = dict(launch.signature)
    constexprs, attributes = dict(launch.constexprs), dict(launch.attributes)
    for label, place, parameter, _ in _arguments(launch):
        if label not in values:
            continue
        align = len(place) > 1 or not parameter.do_not_specialize_on_alignment
        kind, mark = native_specialize_impl(
            backend, values[label], False, _specializes(place, parameter), align
        )
        constexprs.pop(place, None)
        attributes.pop(place, None)
        # an annotated argument keeps its type, even if it is 1
        kind = parameter.annotation_type or kind
        if len(place) > 1:
            kinds = list(signature[parameter.name])
            kinds[place[1]] = kind
            signature[parameter.name] = tuple(kinds)
        else:
            signature[parameter.name] = kind
        if kind == "constexpr":
            constexprs[place] = values[label]
        if isinstance(mark, str):
            attributes[place] = backend.parse_attr(mark)
    return dataclasses.replace(
        launch, signature=signature, constexprs=constexprs, attributes=attributes
    )


def _source(launch: RecordedLaunch) -> ASTSource:
    return ASTSource(launch.kernel, launch.signature, launch.constexprs, launch.attributes)


def translate(launch: RecordedLaunch) -> None:
    """Translate ``launch`` to Triton's own IR (TTIR), the first stage of a compilation.

    This stage finds errors in a kernel's Python, such as a method call on an argument that became a
    constant.

    Raises:
        CompilationError: The message names the line of the kernel.
    """
    target = GPUTarget("cuda", launch.architecture, 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(launch.options)
    _source(launch).make_ir(target, launch.options, codegen, backend.get_module_map(), context)


def compile_launch(launch: RecordedLaunch) -> CompiledKernel:
    """Compile ``launch`` for its architecture."""
    target = GPUTarget("cuda", launch.architecture, 32)
    return triton.compile(_source(launch), target=target, options=dict(launch.options.__dict__))


def cost(launch: RecordedLaunch) -> Cost:
    """Compile ``launch`` for its architecture and return its resources."""
    compiled = compile_launch(launch)
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(ptx)
        target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
        assert target is not None  # every PTX file states its target
        command = [
            get_ptxas(launch.architecture).path,
            "-v",
            f"--gpu-name={target[1]}",
            str(text),
            "-o",
            str(binary),
        ]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert registers is not None, log
    assert spills is not None, log
    instructions = tuple(sorted(set(_INSTRUCTIONS.findall(ptx))))
    serialized = tuple(sorted(set(_SERIALIZED.findall(log))))
    return Cost(
        compiled.metadata.shared,
        int(registers[1]),
        int(spills[1]) + int(spills[2]),
        instructions,
        serialized,
    )
