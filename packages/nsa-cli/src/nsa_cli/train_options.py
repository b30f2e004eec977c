"""The options of `nsa train`, and which of them a resumed run has from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[
    Path, typer.Option("--out", help="Folder of the run: checkpoint.safetensors and log.jsonl.")
]
Data = Annotated[
    str,
    typer.Option(
        help=(
            "A text file, folder, JSONL or parquet; python-docs, fineweb-edu, hf:NAME[:CONFIG];"
            " uniform or recall."
        )
    ),
]
Size = Annotated[str, typer.Option(help="tiny, toy or m7c_125m.")]
Attention = Annotated[str, typer.Option(help="nsa or dense.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="A tokenizer.json; left out: bytes of UTF-8.", show_default=False),
]
TextField = Annotated[str, typer.Option(help="Where JSONL, parquet and data sets hold the text.")]
HeldOut = Annotated[float, typer.Option(help="Share of the documents that is never trained on.")]
HeldOutRows = Annotated[
    int, typer.Option(help="Rows of them that the held-out loss is taken over.", min=1)
]
Length = Annotated[int, typer.Option(help="Tokens a row.", min=2)]
Vocab = Annotated[int, typer.Option(help="Different tokens of uniform and recall.", min=2)]
Steps = Annotated[int, typer.Option(help="Updates; the cosine ends with them.", min=1)]
Batch = Annotated[int, typer.Option(help="Rows a step, over all processes.", min=1)]
Accumulate = Annotated[int, typer.Option(help="Parts that a step's rows are taken in.", min=1)]
Rate = Annotated[float, typer.Option("--lr", help="Learning rate after the warm-up.")]
Warmup = Annotated[int, typer.Option(help="Steps of the warm-up; a cosine follows.", min=0)]
WeightDecay = Annotated[float, typer.Option(help="Of matrices.")]
Clip = Annotated[float, typer.Option(help="Norm that the gradients are cut to.")]
Dtype = Annotated[str, typer.Option(help="float32, or bfloat16 for products under autocast.")]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Activation checkpointing: less memory, more time.")
]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile.")]
Graph = Annotated[bool, typer.Option("--cuda-graph", help="A step as one CUDA graph; one GPU.")]
Parallel = Annotated[str, typer.Option(help="Under torchrun: ddp or fsdp.")]
EvalEvery = Annotated[int, typer.Option(help="Steps between held-out losses.", min=1)]
SaveEvery = Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)]
Seed = Annotated[
    int, typer.Option(help="Of the weights and of the data's order.", min=0, max=2**63 - 1)
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[int, typer.Option(help="CPU threads.", min=1)]
Backends = Annotated[str, typer.Option(help="auto, one backend, or win=fa2,cmp=triton.")]
FromDense = Annotated[
    Path | None,
    typer.Option(
        help="Begin with the weights of a dense checkpoint: a run's, or a Llama's in safetensors.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the run in --out, and the plots.")]
Png = Annotated[
    Path | None, typer.Option("--png", help="Plot the losses as PNG.", show_default=False)
]
Svg = Annotated[
    Path | None, typer.Option("--svg", help="Plot the losses as SVG.", show_default=False)
]

# Options that are fields of nsa_models.lm.recipe.Recipe, and may change when a run is resumed.
FREE = (
    "steps",
    "accumulate",
    "recompute",
    "compile",
    "graph",
    "parallel",
    "eval_every",
    "save_every",
)
# Fields of Recipe and nsa_models.lm.task.DataSpec whose options are called otherwise.
RENAMED = {
    "learning_rate": "lr",
    "precision": "dtype",
    "graph": "cuda_graph",
    "vocab_size": "vocab",
}
TASKS_ONLY, TEXT_ONLY = ("vocab",), ("tokenizer", "text_field", "held_out")
# With --resume these are the checkpoint's: they fix what is computed.
FIXED = (
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
