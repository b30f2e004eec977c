"""`nsa tune`: measure the ready backends of each slot on this device, and let `auto` use the
fastest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nsa_cli import output
from nsa_cli.choices import block_sizes, dtype_names, pick_device
from nsa_core.errors import InvalidInput

if TYPE_CHECKING:
    from nsa_bench.tune import Tuning


def tune(
    shape: Annotated[str, typer.Option(help="Hq/G/Dk[/Dv], reports, paper or tiny.")] = "reports",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 on cuda, float32 on cpu.", show_default=False)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens; 8192 on cuda, 1024 on cpu.", min=1, show_default=False),
    ] = None,
    blocks: Annotated[str, typer.Option(help="l,d,l',n,w.")] = "32,16,64,16,512",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    budget: Annotated[
        float, typer.Option(help="Seconds per figure; 3 to 20 samples.", min=0.001)
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of every random input.")] = 0,
) -> None:
    """Time the backends that can run each slot of a shape class, and save the order for this
    device.

    `auto` then takes the fastest ("nsa backends explain" shows it). What fails its check against
    the float64 truth is not timed, its slot keeps the stated order, and the exit code is 1.
    """
    with output.exit_codes():
        place = pick_device(device, threads)
        cuda = place.startswith("cuda")
        name, *more = dtype_names(dtype or ("bfloat16" if cuda else "float32"))
        if more:
            raise InvalidInput(f"--dtype must be one dtype, got {dtype!r}")
        import torch

        from nsa_bench.shapes import parse_shape
        from nsa_bench.tune import steps
        from nsa_bench.tune import tune as measure
        from nsa_core.dispatch import tuned

        config = parse_shape(shape).config(block_sizes(blocks))
        registry = output.find_backends()
        kind = getattr(torch, name)
        with output.progress(steps(config, registry, place, kind)) as advance:
            result = measure(
                config,
                registry,
                device=place,
                dtype=kind,
                length=length or (8192 if cuda else 1024),
                seed=seed,
                budget_s=budget,
                advance=advance,
            )
        saved = tuned.save(result.records)
        _print(result, str(saved))
    raise typer.Exit(0 if all(gate.ok for gate in result.gates) else output.FAILED)


def _print(result: Tuning, saved: str) -> None:
    from nsa_bench.render.format import number

    table = output.plain_table("slot", "use", "backend", "ms", "chosen")
    fastest = {
        (r.slot, r.shape_class.rsplit(" ", 1)[1]): min(r.times_ms, key=r.times_ms.__getitem__)
        for r in result.records
    }
    for t in sorted(result.times, key=lambda t: (t.slot, t.use, t.time_ms or float("inf"))):
        chosen = "yes" if fastest.get((t.slot, t.use)) == t.backend else ""
        table.add_row(
            t.slot,
            t.use,
            f"{output.one_line(t.backend)} {output.one_line(t.version)}",
            number(t.time_ms),
            chosen or t.reason,
        )
    console = output.console()
    console.print(table)
    for gate in result.gates:
        for failure in gate.failures[:3]:
            console.print(f"NOT CORRECT {gate.combo}: {output.one_line(failure)}", style="red")
    console.print(
        f"{len(result.records)} choices for {result.device} saved in {saved}", style="bold"
    )
