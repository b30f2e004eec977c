"""`nsa backends`: what is installed, what it offers, and why a request goes where it goes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import output
from nsa_cli.choices import pick_device

if TYPE_CHECKING:
    from nsa_core.dispatch.candidates import Candidates

_HELP = """List the backends, show one, or explain who would run a request and why.

NSA_PLUGINS=name,... loads only these third-party plugins ("" none); NSA_DISABLE_PLUGINS=name,...
leaves these out ("1" or "all": every third-party plugin). Names are those of entry points or
distributions.
"""
app = typer.Typer(help=_HELP, rich_markup_mode=None)

_Phase = Annotated[str, typer.Option("--phase", help="Ask about prefill or decode.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON with a schema_version.")]


@app.command("list")
def list_backends(
    json: _Json = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe", help="--no-probe reads the metadata only and loads nothing."
        ),
    ] = True,
    phase: _Phase = "prefill",
) -> None:
    """Every installed backend: version, status, what each slot offers, and the reason when it is
    not ready.

    Probed with the shape 12/2/64 in float32 on the CPU, or bfloat16 on CUDA where there is a GPU.
    Exit code 4 when nothing can work.
    """
    from nsa_cli import backend_rows as rows

    with output.exit_codes():
        if probe:
            registry, document = rows.probed(phase=phase)
            usable = bool(registry.ready())
        else:
            document = rows.unprobed()
            usable = bool(document["backends"])
        if json:
            output.print_json(document)
        else:
            rows.print_list(document)
        if not usable:
            rows.complain(document)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A backend's name.")],
    json: _Json = False,
    phase: _Phase = "prefill",
) -> None:
    """Everything known about one backend."""
    from nsa_cli import backend_rows as rows

    with output.exit_codes():
        registry = output.find_backends()
        wanted = registry.get(name)  # refuses unknown names before anything is probed
        _, document = rows.probed(registry, phase)
        document["backends"] = [row for row in document["backends"] if row["name"] == wanted.name]
        rows.add_details(document, registry)
        if json:
            output.print_json(document)
        else:
            rows.print_details(document)


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(help="The backend's name: lower-case words joined by '-'.")
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory to create, or an empty one.")
    ],
) -> None:
    """Write a working plugin package: one slot in plain PyTorch, its conformance test, its README.

    The distribution is nsa-backend-NAME. docs/write-a-backend.md walks through it.
    """
    from nsa_cli import scaffold

    with output.exit_codes():
        written = scaffold.create(name, folder)
        console = output.console()
        for path in written:
            console.print(str(path))
        console.print(
            f"next: pip install -e {shlex.quote(f'{folder}[test]')}; nsa conformance {name}"
        )


_ValueWidth = Annotated[
    int | None,
    typer.Option(help="Dv, width of a value head; left out, as --head-dim.", show_default=False),
]
_PageSize = Annotated[
    int | None,
    typer.Option(help="Decode: tokens of a page of the cache; left out, none.", show_default=False),
]
_Slot = typer.Option(help="Backend asked for; left out, the best that accepts.", show_default=False)


@app.command()
def explain(
    cmp: Annotated[str | None, _Slot] = None,
    sel: Annotated[str | None, _Slot] = None,
    win: Annotated[str | None, _Slot] = None,
    select: Annotated[str | None, _Slot] = None,
    combine: Annotated[str | None, _Slot] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "float32",
    head_dim: Annotated[int, typer.Option(help="Dk, width of a query or key head.")] = 64,
    v_head_dim: _ValueWidth = None,
    n_heads: Annotated[int, typer.Option(help="Query heads.")] = 12,
    n_kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 2,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N; auto is cuda where there is one.")
    ] = "auto",
    batch: Annotated[
        int | None, typer.Option(help="Sequences; left out, unknown.", min=0, show_default=False)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens; left out, unknown.", min=0, show_default=False)
    ] = None,
    grad: Annotated[
        bool, typer.Option("--grad/--no-grad", help="Whether gradients are needed.")
    ] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed documents.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Demand equal bits every run.")
    ] = False,
    phase: Annotated[str, typer.Option(help="prefill or decode.")] = "prefill",
    page_size: _PageSize = None,
    json: _Json = False,
) -> None:
    """Who would run each slot of a request: every candidate, accepted or with each reason and its
    hint.

    Exit code 3 when a slot has nobody to run it.
    """
    from nsa_cli import explain_rows as rows

    named = {"cmp": cmp, "select": select, "sel": sel, "win": win, "combine": combine}
    with output.exit_codes():
        from nsa_core.config import NSAConfig
        from nsa_core.dispatch.candidates import find_candidates
        from nsa_core.dispatch.options import PlanOptions

        config = NSAConfig(
            dim=n_heads * head_dim,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            # rotary embedding is not a slot: an odd head width is a question that may be asked
            rope=False,
        )
        options = PlanOptions(
            device=pick_device(device),
            dtype=dtype,
            backends=named,
            needs_grad=grad,
            deterministic=deterministic,
            varlen=varlen,
            phase=phase,
            batch=batch,
            seq_len=seq_len,
            page_size=page_size,
        )
        answers: Candidates = find_candidates(config, options, registry=output.find_backends())
        document: dict[str, Any] = rows.explained(answers)
        if json:
            output.print_json(document)
        else:
            rows.print_explained(document)
        rows.leave(document)
