"""Run the kernels of an older GPU on a newer one.

    python benchmarks/rehearse.py --arch 80 -- nsa verify --device cuda

Inside the command

- Triton compiles for the older architecture (`mma.sync` and `cp.async`, no `wgmma`, no TMA), and
  ptxas assembles that PTX for the GPU at hand;
- torch.cuda reports the older compute capability, so probes and tuned tables choose as they would
  on that GPU, and its name says that this is a rehearsal, so that reports do too;
- each launch asks for so much dynamic shared memory that no more programs are resident on a
  multiprocessor than on the older GPU, and a launch that it could not hold is refused.

Carries over: results, choices, occupancy, spills, and times relative to other code for the older
architecture, FlashAttention-2 among it. Does not carry over: milliseconds. Memory bandwidth, the
L2 cache, clocks, the number of multiprocessors and the rate of matrix instructions are those of the
GPU at hand. cuDNN runs its kernels for that GPU: leave it out of comparisons.

The exit code is the command's, or 1 if a kernel was compiled for another architecture.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

# arch -> KiB of shared memory, threads and programs of a multiprocessor; KiB of one program
TARGETS = {80: (164, 2048, 32, 163), 86: (100, 1536, 16, 99), 89: (100, 1536, 24, 99)}
RESERVED = 1024  # bytes of shared memory that the driver adds to each program
GRANULE = 128  # bytes; shared memory is allocated in multiples of it


def padded(shared: int, warps: int, arch: int, here: int) -> int:
    """Return the bytes of shared memory to ask for, so that residency is at most that of ``arch``.

    Args:
        shared: Bytes that the kernel needs.
        warps: Warps of a program.
        arch: The rehearsed architecture.
        here: Bytes of shared memory of a multiprocessor of the GPU at hand.
    """
    total, threads, programs, _ = TARGETS[arch]
    resident = min(total * 1024 // (shared + RESERVED), threads // (32 * warps), programs)
    # The least amount of which ``resident`` + 1 do not fit here.
    least = here // (resident + 1) - RESERVED + 1
    return max(shared, -(-least // GRANULE) * GRANULE)


# Every Python process of the command imports it. It patches modules when they are imported, because
# not every process imports torch.
SITE = """
import importlib.abc, importlib.util, runpy, sys

ARCH, PADDED = {arch}, runpy.run_path({tool!r}, run_name="rehearse")


def patch_cuda(cuda):
    name = cuda.get_device_name
    cuda.get_device_capability = lambda device=None: divmod(ARCH, 10)
    cuda.get_device_name = lambda device=None: f"{{name(device)}} rehearsing sm_{{ARCH}}"


def patch_compiler(compiler):
    kernel, initialise = compiler.CompiledKernel, compiler.CompiledKernel._init_handles

    def pad(self):
        if self.module is None:
            import torch
            from triton.backends.compiler import GPUTarget
            limit, shared = PADDED["TARGETS"][ARCH][3] * 1024, self.metadata.shared
            if shared > limit:
                raise compiler.OutOfResources(shared, limit, "shared memory")
            here = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
            bytes_ = PADDED["padded"](shared, self.metadata.num_warps, ARCH, here)
            self.metadata = self.metadata._replace(shared=bytes_)
            backend = compiler.make_backend(self.metadata.target)
            self.packed_metadata = backend.pack_metadata(self.metadata)
        initialise(self)

    kernel._init_handles = pad


PATCHES = {{"torch.cuda": patch_cuda, "triton.compiler.compiler": patch_compiler}}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        patch = PATCHES.pop(fullname, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
"""
PTXAS = """#!/bin/sh
# Assemble PTX of sm_{arch} for sm_{real}.
for argument do
  shift
  case $argument in --gpu-name=sm_{arch}) argument=--gpu-name=sm_{real} ;; esac
  set -- "$@" "$argument"
done
exec {ptxas} "$@"
"""


def prepare(folder: pathlib.Path, arch: int, real: str) -> dict[str, str]:
    """Write the files of a rehearsal to ``folder``; return its environment variables."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise SystemExit("rehearse.py: triton is not installed: pip install triton")
    ptxas = pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    script = folder / "ptxas"
    script.write_text(PTXAS.format(arch=arch, real=real, ptxas=shlex.quote(str(ptxas))))
    script.chmod(0o755)
    (folder / "sitecustomize.py").write_text(
        SITE.format(arch=arch, tool=str(pathlib.Path(__file__).resolve()))
    )
    former = os.environ.get("PYTHONPATH")
    return {
        "TRITON_OVERRIDE_ARCH": f"sm{arch}",
        "TRITON_PTXAS_PATH": str(script),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(folder), *([former] if former else [])]),
    }


def foreign_kernels(cache: pathlib.Path, arch: int) -> tuple[int, list[str]]:
    """Return how many kernels were compiled, and the files of those for another architecture."""
    files = sorted(cache.rglob("*.ptx"))
    target = re.compile(rf"^\.target sm_{arch}$", re.MULTILINE)
    foreign = [
        str(f.relative_to(cache))
        for f in files
        if not target.search(text := f.read_text()) or "wgmma" in text
    ]
    return len(files), foreign


def run_to_its_end(command: list[str], variables: dict[str, str]) -> int:
    """Run ``command`` with further environment variables and return its exit code.

    Ctrl-C reaches the command too, which may still write its report.
    """
    process = subprocess.Popen(command, env={**os.environ, **variables})
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def main() -> int:
    """Run the command, and check its kernels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--arch", type=int, choices=TARGETS, default=80, help="default: 80, an A100"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what to run")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("no command: python benchmarks/rehearse.py --arch 80 -- nsa verify")
    import torch

    if not torch.cuda.is_available():
        parser.error("torch sees no GPU; a rehearsal needs one of sm_90 or later")
    real = "".join(map(str, torch.cuda.get_device_capability()))
    if int(real) <= arguments.arch:
        parser.error(f"this GPU is sm_{real}: rehearse an older architecture than its own")
    with tempfile.TemporaryDirectory(prefix="rehearse-") as folder:
        path = pathlib.Path(folder)
        variables = prepare(path, arguments.arch, real)
        try:
            code = run_to_its_end(command, variables)
        except FileNotFoundError:
            parser.error(f"{command[0]} is not a command")
        count, foreign = foreign_kernels(path / "cache", arguments.arch)
    print(f"rehearsed sm_{arguments.arch} on sm_{real}: {count} kernels", file=sys.stderr)
    if foreign:
        print(f"not for sm_{arguments.arch}: {', '.join(foreign[:5])}", file=sys.stderr)
        return code or 1
    return code


if __name__ == "__main__":
    sys.exit(main())
