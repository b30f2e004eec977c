"""The figures of one GPU, in pieces of at most ten minutes each.

A piece is one command that writes one result file. `figures.py` runs them, and the tables of
`figure_tables.py` read the files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

CHECKPOINTS = "build/figures/checkpoints"
PUBLISHED = "h200"  # folder of benchmarks/results with the figures of README.md and the docs

_BENCH = "nsa bench --device cuda --dtype bfloat16 --threads 8"
_DECODE = "nsa bench decode --device cuda --dtype bfloat16 --threads 8"
_CORE = (
    _BENCH + " --shape {shape} --length {lengths} --phase {phases} {combos} --inputs {inputs}"
    " --rival {rivals} --budget 0.3 --max-call 1 --cell-limit 30 --time-limit {seconds}"
    " --json {{file}}"
)
_CORE_LENGTHS = "8k,32k,64k"
_ON_ALL_GPUS = "python -m torch.distributed.run --standalone --nproc-per-node gpu"
_REHEARSE = "python benchmarks/rehearse.py --arch 80 --"
_TRAIN = "python benchmarks/train.py --device cuda --only {section} --time-limit {seconds}"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One command and the result file that it writes.

    Attributes:
        name: The name for ``--only``.
        topic: The subject of the file, which `figures.py list` prints.
        command: The command, run in the repository's root; ``{file}`` stands for the result file.
        file: Name of the result file in benchmarks/results/<gpu>.
        minutes: Expected duration on an H100 or H200, compilation included.
        needs: Name of the piece that makes input files of this one; "" for none.
        makes: Input files of other pieces that this one makes, relative to the repository's root.
        gpus: Number of GPUs; a piece that needs several runs only if it is named.
        rehearses: Architecture whose code the GPU runs, such as "sm80"; "" for its own. The file is
            then in benchmarks/results/<gpu>_as_sm80.
    """

    name: str
    topic: str
    command: str
    file: str
    minutes: float
    needs: str = ""
    makes: tuple[str, ...] = ()
    gpus: int = 1
    rehearses: str = ""

    def inside(self, folder: Path) -> Path:
        """Return the path of the result file, given the folder of the GPU's own results."""
        return folder.with_name(folder.name + _ending(self.rehearses)) / self.file

    def nearest(self, folder: Path) -> Path | None:
        """Return the result file of :meth:`inside`, or that of another GPU; None if none exists."""
        return nearest(folder, self.file, self.rehearses)


def nearest(folder: Path, file: str, rehearses: str = "") -> Path | None:
    """Return a result file of a GPU, or that of another GPU; None if none exists.

    Args:
        folder: The folder of the GPU's own results.
        file: Name of the result file.
        rehearses: Architecture whose code the GPU ran, such as "sm80"; "" for its own.
    """
    ending = _ending(rehearses)
    own = folder.with_name(folder.name + ending) / file
    others = (
        path
        for path in sorted(folder.parent.glob(f"*{ending}/{file}"))
        if rehearses or "_as_" not in path.parent.name
    )
    return own if own.exists() else next(others, None)


def _ending(rehearses: str) -> str:
    return f"_as_{rehearses}" if rehearses else ""


def _checkpoint(shape: str) -> str:
    return f"{CHECKPOINTS}/{shape.replace('/', '-')}.safetensors"


def _core(shape: str, minutes: float) -> Piece:
    heads = shape.replace("/", "-")
    command = _CORE.format(
        shape=shape,
        lengths=_CORE_LENGTHS,
        phases="both",
        combos="--combo auto",
        rivals="none",
        inputs=f"random,real --checkpoint {_checkpoint(shape)}",
        seconds=round(60 * (minutes - 1)),
    )
    return Piece(
        f"core-{heads}",
        f"NSA and dense attention at {shape}, random and real inputs",
        command,
        f"core_{heads.replace('-', '_')}.json",
        minutes,
        "real-blocks",
    )


def _train(name: str, topic: str, section: str, minutes: float, modes: str = "") -> Piece:
    command = _TRAIN.format(section=section, seconds=round(60 * (minutes - 1)))
    command += f" --modes {modes}" * bool(modes) + " --json {file}"
    return Piece(name, topic, command, f"{name.replace('-', '_')}.json", minutes)


def _parallel_training(name: str, topic: str, options: str, start: str = "python") -> Piece:
    command = f"{start} benchmarks/parallel_training.py {options} --device cuda"
    command += " --time-limit 100 --json {file}"
    return Piece(name, topic, command, f"{name.replace('-', '_')}.json", 2, gpus=2)


def _fa2(provider: str) -> Piece:
    name = provider.lower().replace("-", "_")
    return Piece(
        f"fa2-pieces-{name.replace('_', '-')}",
        f"cmp and win on FlashAttention-2 from {provider}",
        f"python benchmarks/kernels/fa2_pieces.py {{file}} --provider {provider}",
        f"fa2_pieces_{name}.json",
        2,
    )


def _a100_core(shape: str) -> Piece:
    heads = shape.replace("/", "-")
    command = _CORE.format(
        shape=shape,
        lengths=_CORE_LENGTHS,
        phases="both",
        combos="--combo triton --combo auto",
        inputs="random",
        rivals="sfnsa,xunhao",
        seconds=300,
    )
    return Piece(
        f"a100-core-{heads}",
        f"NSA, dense FlashAttention-2 and other NSA libraries at {shape}, all with code for the"
        " A100",
        f"{_REHEARSE} {command}",
        f"a100_core_{heads.replace('-', '_')}.json",
        5.5,
        rehearses="sm80",
    )


def _shapes(length: str, shapes: str, minutes: float) -> Piece:
    return Piece(
        f"shapes-{length}",
        f"NSA and dense attention at heads of released models, {length} tokens",
        # The other NSA libraries are left out: their kernels compile for minutes for each shape.
        f"{_BENCH} --shape {shapes} --length {length} --phase both --inputs random --combo auto"
        f" --rival none --budget 0.3 --max-call 1 --cell-limit 30"
        f" --time-limit {round(60 * (minutes - 1))} --json {{file}}",
        f"shapes_{length}.json",
        minutes,
    )


def _backends(shape: str) -> Piece:
    name = f"backends-{shape.replace('/', '-')}"
    return Piece(
        name,
        f"NSA, every dense kernel, sfnsa and xunhao at {shape}, by sequence length",
        # From 5k to 16k the lengths are close, because there NSA becomes faster than dense
        # attention. Only the piece rivals measures fla, because its kernels compile for minutes.
        f"{_BENCH} --shape {shape} --length 2k,5k,8k,10k,12k,16k,32k,64k"
        " --phase forward,both --inputs random --combo auto --combo sdpa"
        " --rival sfnsa,xunhao --budget 0.12 --max-call 0.8 --cell-limit 14 --time-limit 300"
        " --json {file}",
        f"{name.replace('-', '_')}.json",
        6,
    )


SHAPES = ("12/2/64", "32/8/128", "64/4/128", "64/4/192/128")
BACKEND_SHAPES = SHAPES[:3]

PIECES = (
    Piece(
        "real-blocks",
        "overlap of the blocks that neighbouring tokens select, before and after training on text",
        "python benchmarks/real_blocks.py --device cuda --json {file}"
        f" --checkpoints {CHECKPOINTS}",
        "real_blocks.json",
        3,
        makes=tuple(map(_checkpoint, SHAPES)),
    ),
    _core("12/2/64", 3),
    _core("32/8/128", 5),
    _core("64/4/128", 9),
    _core("64/4/192/128", 9),
    Piece(
        "core-parts",
        "each kernel of NSA alone, forward and backward, random and real inputs",
        _CORE.format(
            shape=",".join(SHAPES),
            lengths="32k",
            phases="forward,backward",
            combos="--combo auto",
            rivals="none",
            inputs="random,real " + " ".join(f"--checkpoint {_checkpoint(s)}" for s in SHAPES),
            seconds=300,
        ),
        "core_parts.json",
        6,
        "real-blocks",
    ),
    _shapes("16k", "40/8/128,48/6/80,16/2/96,32/32/64,8/1/256", 7),
    _shapes("32k", "28/4/128,64/8/128", 4),
    _shapes("128k", "16/1/128", 6),
    *map(_backends, BACKEND_SHAPES),
    Piece(
        "rivals",
        "NSA, dense attention and all other NSA libraries in one run, at 64/4/128",
        f"{_BENCH} --shape 64/4/128 --length 2k..16k --phase both --inputs random"
        " --budget 0.12 --max-call 0.5 --time-limit 500 --json {file}",
        "rivals.json",
        9.5,
    ),
    Piece(
        "decode",
        "decode steps with large caches",
        f"{_DECODE} --budget 0.1 --time-limit 240 --json {{file}}",
        "decode.json",
        5,
    ),
    Piece(
        "decode-small",
        "decode steps at the shape of the earlier reports",
        f"{_DECODE} --shape 8/2/32 --length 512,1k,2k --batch 1 --combo auto"
        " --combo sdpa --budget 0.05 --time-limit 100 --json {file}",
        "decode_small.json",
        2,
    ),
    _train(
        "train",
        "training throughput of NSA and of dense attention",
        "throughput",
        9.5,
        "compile+graph,bf16+compile+graph,flash4+bf16+compile+graph",
    ),
    _train(
        "train-recompute",
        "training throughput and memory with recompute=True, without it, and of dense attention",
        "throughput",
        6,
        "compile+graph,recompute+compile+graph --shapes 2048x8,16384x1,65536x1",
    ),
    _train(
        "train-parts",
        "time of a training step by groups of kernels, of NSA and of dense attention",
        "parts",
        6,
        "bf16+compile+graph --shapes 2048x8,8192x1,16384x1",
    ),
    _train("train-memory", "training memory of NSA and of dense attention", "memory", 4),
    _train("train-stall", "variation of step times, memory growth", "stall", 3, "compile+graph"),
    _train("train-layers", "forward and backward time by number of layers", "layers", 2),
    _train(
        "train-toy",
        "training throughput of a one-layer model",
        "toy",
        2,
        "compile,compile+graph,eager",
    ),
    Piece(
        "cmp-routes",
        "the compressed branch with every implementation, by sequence length",
        "python benchmarks/kernels/cmp_routes.py --json {file}",
        "cmp_routes.json",
        4,
    ),
    Piece(
        "sel-rivals",
        "the forward of sel beside cuDNN's selection attention; needs nvidia-cudnn-frontend",
        "python benchmarks/kernels/sel_rivals.py --json {file}",
        "sel_rivals.json",
        1,
    ),
    Piece(
        "context-parallel",
        "one document on one GPU, on two and on all; needs two GPUs or four",
        f"{_ON_ALL_GPUS} benchmarks/scaling.py --length 64k,256k --on-most 1M --layouts head_tail"
        " --budget 0.4 --json {file}",
        "context_parallel.json",
        3,
        gpus=2,
    ),
    _parallel_training(
        "parallel-loss",
        "losses of training divided over two GPUs (heads) beside those of one; needs two GPUs",
        "loss --gpus 2",
    ),
    _parallel_training(
        "parallel-loss-sequence",
        "losses of training divided over two GPUs (sequence) beside those of one; needs two GPUs",
        "loss --kv-heads 3 --gpus 2",
    ),
    _parallel_training(
        "parallel-speed",
        "a training step of 12 layers at 256k tokens on one GPU and on all; needs two GPUs or four",
        "speed",
        _ON_ALL_GPUS,
    ),
    _fa2("flash-attn"),
    _fa2("PyTorch"),
    _a100_core("12/2/64"),
    _a100_core("32/8/128"),
    _a100_core("64/4/128"),
    Piece(
        "a100-decode",
        "decode steps with large caches, with code for the A100",
        f"{_REHEARSE} {_DECODE} --combo auto --budget 0.1 --time-limit 240 --json {{file}}",
        "a100_decode.json",
        5,
        rehearses="sm80",
    ),
    Piece(
        "block-attention",
        "block_attention and dense attention, by sequence length and block size",
        "python benchmarks/block_attention.py --device cuda --json {file}",
        "block_attention.json",
        2,
    ),
    Piece(
        "a100-block-attention",
        "block_attention and dense FlashAttention-2, all with code for the A100",
        f"{_REHEARSE} python benchmarks/block_attention.py --device cuda --json {{file}}",
        "blocks.json",
        2,
        rehearses="sm80",
    ),
    Piece(
        "serving-decode",
        "steps and prompts of nsa_decode over pages of vLLM, and dense FlashAttention",
        "python benchmarks/kernels/serving_decode.py --json {file}",
        "serving_decode.json",
        4,
    ),
    Piece(
        "counters",
        "hardware counters of the core's kernels, read by Nsight Compute",
        "python benchmarks/kernels/counters.py --json {file}",
        "counters.json",
        2,
    ),
    Piece(
        "hf-minimax",
        "training losses of MiniMax-M3 with nsa_blocks and with eager",
        "python benchmarks/hugging_face/minimax_learning.py --json {file}",
        "hf_minimax.json",
        1.5,
    ),
)
