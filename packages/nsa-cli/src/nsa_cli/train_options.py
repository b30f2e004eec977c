"""The options of `nsa train`, and which of them a resumed run reads from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_cli.choices import ADVANCED, complete_device, complete_pairs, completion, tokens

Out = Annotated[
    Path,
    typer.Option("--out", help="Output folder for checkpoint.safetensors and log.jsonl."),
]
Data = Annotated[
    str,
    typer.Option(
        help=(
            "Training data: a text, JSONL or parquet file, a folder, python-docs, fineweb-edu,"
            " hf:NAME[:CONFIG], or a synthetic task (uniform, recall)."
        ),
        autocompletion=completion("python-docs", "fineweb-edu", "uniform", "recall"),
    ),
]
Size = Annotated[
    str,
    typer.Option(
        help="tiny, toy or m7c_125m.", autocompletion=completion("tiny", "toy", "m7c_125m")
    ),
]
Attention = Annotated[
    str,
    typer.Option(
        help="Kind of attention: nsa or dense.", autocompletion=completion("nsa", "dense")
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        help="Path of a tokenizer.json. Default: UTF-8 bytes.",
        show_default=False,
        rich_help_panel=ADVANCED,
    ),
]
TextField = Annotated[
    str,
    typer.Option(
        help="Field that holds the text in JSONL, parquet and data sets.", rich_help_panel=ADVANCED
    ),
]
HeldOut = Annotated[
    float,
    typer.Option(
        help="Fraction of the documents held out from training.", rich_help_panel=ADVANCED
    ),
]
HeldOutRows = Annotated[
    int,
    typer.Option(
        help="Number of held-out rows in the evaluation.", min=1, rich_help_panel=ADVANCED
    ),
]
Length = Annotated[
    int, typer.Option(help="Tokens per row, such as 512, 64k or 1M.", parser=tokens(2))
]
Vocab = Annotated[
    int,
    typer.Option(help="Vocabulary size of uniform and recall.", min=2, rich_help_panel=ADVANCED),
]
Steps = Annotated[
    int, typer.Option(help="Number of updates; the cosine schedule ends there.", min=1)
]
Batch = Annotated[
    int,
    typer.Option(help="Rows per step over all processes; a process reads only its own.", min=1),
]
Accumulate = Annotated[
    int,
    typer.Option(
        help="Gradient accumulation: parts into which a step is split.",
        min=1,
        rich_help_panel=ADVANCED,
    ),
]
LearningRate = Annotated[float, typer.Option("--lr", help="Learning rate after the warm-up.")]
Warmup = Annotated[
    int,
    typer.Option(
        help="Warm-up steps, before the cosine schedule begins.", min=0, rich_help_panel=ADVANCED
    ),
]
WeightDecay = Annotated[
    float, typer.Option(help="Weight decay of the matrices.", rich_help_panel=ADVANCED)
]
Clip = Annotated[
    float, typer.Option(help="Maximum norm of the gradients.", rich_help_panel=ADVANCED)
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32 (fp32), or bfloat16 (bf16, autocast).",
        autocompletion=completion("float32", "bfloat16", "fp32", "bf16"),
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute",
        help="Activation checkpointing: less memory, more time.",
        rich_help_panel=ADVANCED,
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the model with torch.compile.", rich_help_panel=ADVANCED
    ),
]
Graph = Annotated[
    bool,
    typer.Option(
        "--cuda-graph",
        help="Run each step as one CUDA graph (one GPU only).",
        rich_help_panel=ADVANCED,
    ),
]
Parallel = Annotated[
    str,
    typer.Option(
        help="Data parallelism under torchrun: ddp (copies of the model) or fsdp (shards of it).",
        autocompletion=completion("ddp", "fsdp"),
        rich_help_panel=ADVANCED,
    ),
]
ContextParallel = Annotated[
    int,
    typer.Option(
        help="Context parallelism: number of processes that share the tokens of a row.",
        min=1,
        rich_help_panel=ADVANCED,
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        help="Tensor parallelism: number of processes that share the heads of a layer.",
        min=1,
        rich_help_panel=ADVANCED,
    ),
]
EvalEvery = Annotated[
    int, typer.Option(help="Steps between evaluations.", min=1, rich_help_panel=ADVANCED)
]
SaveEvery = Annotated[
    int, typer.Option(help="Steps between checkpoints.", min=1, rich_help_panel=ADVANCED)
]
Seed = Annotated[
    int, typer.Option(help="Seed of the weights and the data order.", rich_help_panel=ADVANCED)
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", autocompletion=complete_device)]
Threads = Annotated[int, typer.Option(help="CPU threads.", min=1, rich_help_panel=ADVANCED)]
Backends = Annotated[
    str,
    typer.Option(
        help="auto, one backend for all slots, or pairs such as win=fa2,cmp=triton.",
        autocompletion=complete_pairs,
        rich_help_panel=ADVANCED,
    ),
]
FromDense = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Start from the weights of a dense checkpoint: of `nsa train`, or a Llama in"
            " safetensors."
        ),
        show_default=False,
        rich_help_panel=ADVANCED,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the run in --out and the plots.")]
Png = Annotated[
    Path | None,
    typer.Option(
        "--png",
        help="Write a plot of the losses as PNG.",
        show_default=False,
        rich_help_panel=ADVANCED,
    ),
]
Svg = Annotated[
    Path | None,
    typer.Option(
        "--svg",
        help="Write a plot of the losses as SVG.",
        show_default=False,
        rich_help_panel=ADVANCED,
    ),
]

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
# Fields of Recipe and nsa_models.lm.task.DataSpec -> the parameters of their options, where the
# names differ.
RENAMED = {
    "learning_rate": "lr",
    "precision": "dtype",
    "graph": "cuda_graph",
    "vocab_size": "vocab",
}
TASKS_ONLY, TEXT_ONLY = ("vocab",), ("tokenizer", "text_field", "held_out")
# Options that a resumed run reads from its checkpoint, because they determine the result.
FROM_CHECKPOINT = (
    "data",
    "size",
    "attention",
    "tokenizer",
    "text_field",
    "held_out",
    "held_out_rows",
    "length",
    "vocab",
    "batch",
    "lr",
    "warmup",
    "weight_decay",
    "clip",
    "dtype",
    "seed",
    "from_dense",
)
