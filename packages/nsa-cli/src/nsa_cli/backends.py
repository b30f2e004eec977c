"""`nsa backends`: list installed backends, show one, explain a plan, and write a new plugin."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nsa_cli import output
from nsa_cli.choices import (
    DTYPE_CHOICES,
    BackendOfSlot,
    Force,
    Json,
    Phase,
    advanced,
    check_backends,
    check_page_size,
    complete_backend,
    errors_name_options,
    one_dtype,
    pick_device,
    refuse_options,
    tokens,
)
from nsa_cli.commands import App
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported

if TYPE_CHECKING:
    from nsa_core.plan.gpus import GPU
    from nsa_core.plan.plan import Plan

_HELP = """List the backends, show one, or explain which backend runs a request and why.

NSA_PLUGINS=name,... loads only the named third-party plugins ("": none).
NSA_DISABLE_PLUGINS=name,... disables the named plugins ("1" or "all": every third-party plugin).
A name is that of an entry point or a distribution.
"""
app = App(help=_HELP)

_GPU = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="GPU",
        help="Answer for a full installation on another GPU: a100, h200, rtx-4090, sm_80, ...",
    ),
]


def _simulated(name: str | None) -> GPU | None:
    """Return the GPU that --gpu names, or None."""
    from nsa_core.plan.gpus import gpu_named

    if name is None:
        return None
    try:
        return gpu_named(name)
    except InvalidInput as error:
        raise InvalidInput(f"--gpu: {error}") from error


@app.command("list")
def list_backends(
    json: Json = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe", help="--no-probe reads package metadata and loads no plugin."
        ),
    ] = True,
    phase: Phase = "prefill",
    gpu: _GPU = None,
    force: Force = False,
) -> None:
    """List all installed backends with their slots and status, one line per backend.

    Each backend is probed with the shape 12/2/64, in bfloat16 on a GPU if one is available, else in
    float32 on the CPU. `show` and `explain` print every reason with a hint. Exit code 4 if no
    backend can be used.
    """
    from nsa_cli import backend_rows as rows

    output.check_writable("--json", json, force)
    simulated = _simulated(gpu)
    if simulated and not probe:
        raise InvalidInput("--gpu needs a probe: leave out --no-probe")
    if probe:
        output.import_with_plugins("torch")
        registry = output.find_backends()
        document = rows.list_and_probe(registry, phase, simulated)
        usable = bool(registry.ready())
    else:
        document = rows.list_from_metadata()
        usable = bool(document["backends"])
    if not output.prints_json(document, json, force):
        rows.print_list(document)
    if not usable:
        state = "none is ready" if document["backends"] else "none is installed"
        hint = "pip install nsa-backend-sdpa"
        output.end(output.BROKEN, f"no backend can be used, {state}; {hint}")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name of the backend.", autocompletion=complete_backend
        ),
    ],
    json: Json = None,
    phase: Phase = "prefill",
    gpu: _GPU = None,
    force: Force = False,
) -> None:
    """Show all details of one backend.

    The details are its slots, priorities, requirements, and the reasons against a typical request.
    """
    from nsa_cli import backend_rows as rows

    output.check_writable("--json", json, force)
    simulated = _simulated(gpu)
    check_backends([name], "NAME")
    output.import_with_plugins("torch")
    registry = output.find_backends()
    entry = registry.get(name)  # raises for an unknown name before any backend is probed
    document = rows.list_and_probe(registry, phase, simulated)
    document["backends"] = [row for row in document["backends"] if row["name"] == entry.name]
    rows.add_details(document, registry)
    if not output.prints_json(document, json, force):
        rows.print_details(document)


@app.command()
def new(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the backend: lower-case words joined by '-'."),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to create, or an empty one.")
    ],
) -> None:
    """Write a working plugin package for a new backend.

    It has one slot in plain PyTorch, a conformance test and a README. The distribution is called
    nsa-backend-NAME. docs/how-to/write-a-backend.md explains its files.
    """
    from nsa_cli import scaffold

    written = scaffold.create(name, folder)
    console = output.console()
    for path in written:
        console.print(str(path))
    console.print(
        f"next: pip install -e {shlex.quote(f'{folder}[test]')};"
        f" python -m pytest {shlex.quote(str(folder))}"
    )


_ValueWidth = Annotated[
    int | None, advanced(help="Dv, width of a value head. Default: --head-dim.", min=1)
]
_PageSize = Annotated[
    int | None,
    advanced(
        help="Tokens per cache page (decode only). Default: no pages.",
        metavar="TOKENS",
        parser=tokens(),
    ),
]
_KVDtype = Annotated[
    Literal["float8_e4m3fn", "int8"] | None,
    advanced(help="Dtype of quantized keys and values (decode only). Default: not quantized."),
]


@app.command()
def explain(
    cmp: BackendOfSlot = None,
    sel: BackendOfSlot = None,
    win: BackendOfSlot = None,
    select: BackendOfSlot = None,
    combine: BackendOfSlot = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of q, k and v. Default: bf16 on cuda, fp32 on cpu.", **DTYPE_CHOICES
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Dk, width of a query or key head.", min=1)] = 64,
    v_head_dim: _ValueWidth = None,
    n_heads: Annotated[int, advanced(help="Query heads.", min=1)] = 12,
    n_kv_heads: Annotated[int, advanced(help="Key/value heads.", min=1)] = 2,
    device: Annotated[
        str, advanced(help="auto: cuda if a GPU is available.", metavar="auto|cpu|cuda|cuda:N")
    ] = "auto",
    batch: Annotated[
        int | None, advanced(help="Sequences per batch. Default: unknown.", min=0)
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence, such as 64k or 1M. Default: unknown.",
            metavar="TOKENS",
            parser=tokens(0),
        ),
    ] = None,
    grad: Annotated[
        bool, typer.Option("--grad/--no-grad", help="Whether gradients are needed.")
    ] = False,
    varlen: Annotated[bool, advanced("--varlen", help="Packed documents.")] = False,
    deterministic: Annotated[
        bool, advanced("--deterministic", help="Require equal bits in every run.")
    ] = False,
    phase: Phase = "prefill",
    page_size: _PageSize = None,
    kv_dtype: _KVDtype = None,
    gpu: _GPU = None,
    json: Json = None,
    force: Annotated[bool, advanced("--force", help="Overwrite the --json file.")] = False,
) -> None:
    """Explain which backend runs each slot of a request.

    Shows the choice first, then the candidates of each slot, with reasons and hints of those that
    cannot run the request. Exit code 3 if none can run some slot.
    """

    named = {"cmp": cmp, "select": select, "sel": sel, "win": win, "combine": combine}
    from nsa_core.config import NSAConfig

    output.check_writable("--json", json, force)
    for slot, backend in named.items():
        check_backends([backend], f"--{slot}")
    prefill_only = {"grad": grad, "varlen": varlen}
    decode_only = {"page_size": page_size, "kv_dtype": kv_dtype}
    others = decode_only if phase == "prefill" else prefill_only
    other = "decode" if phase == "prefill" else "prefill"
    refuse_options([x for x, value in others.items() if value], f"only with --phase {other}")
    with errors_name_options({name: name for name in ("n_heads", "n_kv_heads")}):
        config = NSAConfig(
            dim=n_heads * head_dim,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            rope=False,  # no slot applies it; without it, odd head widths are allowed
        )
    check_page_size(page_size, config.select_block_size)
    simulated = _simulated(gpu)
    if simulated and device != "auto":
        raise InvalidInput(f"--gpu simulates a GPU: leave out --device {device}")
    dtype = None if dtype is None else one_dtype(dtype)
    chosen_device = "cuda" if simulated else pick_device(device)
    from nsa_cli import explain_rows as rows
    from nsa_core.plan.candidates import find_candidates
    from nsa_core.plan.options import PlanOptions
    from nsa_core.plan.plan import decide

    default = "bfloat16" if chosen_device.startswith("cuda") else "float32"
    options = PlanOptions(
        device=chosen_device,
        dtype=dtype or default,
        backends=named,
        needs_grad=grad,
        deterministic=deterministic,
        varlen=varlen,
        phase=phase,
        batch=batch,
        seq_len=seq_len,
        page_size=page_size,
        kv_dtype=kv_dtype,
    )
    output.import_with_plugins("torch")
    candidates = find_candidates(config, options, registry=output.find_backends(), gpu=simulated)
    outcome: Plan | NSAError
    try:
        outcome = decide(candidates)
    except (Unsupported, BackendUnavailable) as error:
        outcome = error
    document = rows.explained(candidates, outcome, simulated)
    if not output.prints_json(document, json, force):
        rows.print_explained(document)
    if isinstance(outcome, NSAError):  # its other lines are printed above
        code = output.BROKEN if document["error"]["nothing_usable"] else output.UNAVAILABLE
        output.end(code, str(outcome).splitlines()[0])
