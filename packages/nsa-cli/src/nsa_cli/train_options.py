"""The options of `nsa train`, and which of them a resumed run reads from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from nsa_cli.choices import advanced, completion, tokens

Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Folder for the model and log.jsonl.")
]
Data = Annotated[
    str,
    typer.Option(
        metavar="FILE|FOLDER|NAME",
        help=(
            "Training data: a text, JSONL or parquet file, a folder, python-docs, fineweb-edu,"
            " hf:NAME[:CONFIG], or a synthetic task (uniform, recall)."
        ),
        autocompletion=completion("python-docs", "fineweb-edu", "uniform", "recall"),
    ),
]
Size = Annotated[Literal["tiny", "toy", "m7c_125m"], typer.Option(help="Size of the model.")]
Attention = Annotated[Literal["nsa", "dense"], typer.Option(help="Kind of attention.")]
Tokenizer = Annotated[Path | None, advanced(help="Path of a tokenizer.json. Default: UTF-8 bytes.")]
TextField = Annotated[
    str, advanced(metavar="NAME", help="Field that holds the text in JSONL, parquet and data sets.")
]
HeldOut = Annotated[
    float,
    advanced(help="Fraction of the documents held out, in (0, 1); of few documents at least one."),
]
HeldOutRows = Annotated[int, advanced(help="Number of held-out rows in the evaluation.", min=1)]
Length = Annotated[
    int,
    typer.Option(
        help="Tokens per row, such as 512, 64k or 1M.", metavar="TOKENS", parser=tokens(2)
    ),
]
Vocab = Annotated[int, advanced(help="Vocabulary size of uniform and recall.", min=2)]
Steps = Annotated[
    int, typer.Option(help="Number of updates; the cosine schedule ends there.", min=1)
]
Batch = Annotated[
    int, typer.Option(help="Rows per step over all processes; a process reads only its own.", min=1)
]
Accumulate = Annotated[
    int, advanced(help="Gradient accumulation: parts into which a step is split.", min=1)
]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate after the warm-up.")]
Warmup = Annotated[int, advanced(help="Warm-up steps, before the cosine schedule begins.", min=0)]
WeightDecay = Annotated[float, advanced(help="Weight decay of the matrices.")]
Clip = Annotated[float, advanced(help="Maximum norm of the gradients.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "fp32", "bf16"],
    typer.Option(metavar="float32|bfloat16", help="bfloat16: autocast, with fp32 parameters."),
]
Recompute = Annotated[
    bool, advanced("--recompute", help="Activation checkpointing: less memory, more time.")
]
Compile = Annotated[bool, advanced("--compile", help="Compile the model with torch.compile.")]
Graph = Annotated[
    bool, advanced("--cuda-graph", help="Run each step as one CUDA graph (one GPU only).")
]
Parallel = Annotated[
    Literal["ddp", "fsdp"],
    advanced(
        help="Data parallelism under torchrun: ddp (copies of the model) or fsdp (shards of it)."
    ),
]
ContextParallel = Annotated[
    int,
    advanced(
        help="Context parallelism: number of processes that share the tokens of a row.", min=1
    ),
]
TensorParallel = Annotated[
    int,
    advanced(
        help="Tensor parallelism: number of processes that share the heads of a layer.", min=1
    ),
]
EvalEvery = Annotated[int, advanced(help="Steps between evaluations.", min=1)]
SaveEvery = Annotated[int, advanced(help="Steps between checkpoints.", min=1)]
Seed = Annotated[int, advanced(help="Seed of the weights and the data order.")]
Checkpoint = Annotated[
    Path | None,
    advanced(
        "--checkpoint",
        metavar="FOLDER",
        help="Start from the weights and the tokenizer of a model folder.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the run in --out and the plots.")]
Png = Annotated[Path | None, advanced("--png", help="Write a plot of the losses as PNG.")]
Svg = Annotated[Path | None, advanced("--svg", help="Write a plot of the losses as SVG.")]

# Fields of nsa_models.lm.recipe.Recipe that may change when a run resumes.
CHANGEABLE_ON_RESUME = (
    "steps",
    "accumulate",
    "recompute",
    "compile",
    "graph",
    "parallel",
    "context_parallel",
    "tensor_parallel",
    "eval_every",
    "save_every",
)
# Fields of Recipe and DataSpec -> the parameters of their options, where the names differ.
RENAMED = {
    "learning_rate": "lr",
    "precision": "dtype",
    "graph": "cuda_graph",
    "vocab_size": "vocab",
}
TASKS = ("uniform", "recall")  # of nsa_models.lm.task
TASKS_ONLY, TEXT_ONLY = ("vocab",), ("tokenizer", "text_field", "held_out")
# Options that the folder of --checkpoint decides.
OF_MODEL = ("size", "attention", "tokenizer")
# Options of a resumed run that its folder does not hold.
NOT_IN_FOLDER = ("device", "threads", "backends", "png", "svg")
# A resumed run reads all others from its folder, because they determine the result.
ON_RESUME = {"out", "resume", "force", *CHANGEABLE_ON_RESUME, *NOT_IN_FOLDER}
