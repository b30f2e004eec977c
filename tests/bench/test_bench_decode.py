"""The decode bench: judged first, whole steps beside their slots, fused ones, a layer and dense
attention.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nsa_backend_sdpa import combine, decode
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_bench.compare import compare
from nsa_bench.decode import DecodeBench, DecodeSettings
from nsa_bench.decode_workloads import (
    DecodeCell,
    default_cells,
    layer_config,
    make_state,
    one_by_one,
    step_costs,
)
from nsa_bench.render.summary import summary
from nsa_bench.render.tables import rows_of
from nsa_bench.result import Result, read_result
from nsa_bench.shapes import Shape
from nsa_bench.timing import Performance, spread_of_repeats
from nsa_cli import bench_decode
from nsa_core.contract import SLOTS, SlotCall
from nsa_core.dispatch.plan import resolve
from nsa_core.dispatch.registry import Registry
from nsa_verify.combination import Combination

BLOCKS = (16, 8, 32, 4, 32)
SHAPE = Shape(4, 2, 16, 16)


def short_window(q, k, v, *, call):
    geometry = dataclasses.replace(call.geometry, window_size=call.geometry.window_size - 1)
    return decode.win(q, k, v, call=dataclasses.replace(call, geometry=geometry))


def step(q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, *, call):
    o_cmp, lse = decode.cmp(q, k_cmp, v_cmp, call=call)
    blocks = decode.select(q, k_cmp, lse, call=call)
    o_sel, _ = decode.sel(q, k_sel, v_sel, blocks, call=call)
    o_win, _ = decode.win(q, k_win, v_win, call=call)
    return combine.forward(
        gates, o_cmp, o_sel, o_win, call=SlotCall(call.geometry, call.scale)
    ), blocks


def registry() -> Registry:
    slots = dict(sdpa().slots)
    wrong = {**slots, "win": dataclasses.replace(slots["win"], decode=f"{__name__}:short_window")}
    fused = dataclasses.replace(
        sdpa(), name="fused", fused={"step": f"{__name__}:step"}, priority=-1
    )
    return (
        Registry(())
        .with_backend(sdpa())
        .with_backend(fused)
        .with_backend(dataclasses.replace(sdpa(), name="wrong", slots=wrong, priority=-2))
    )


def run(*combos: str, cells: list[DecodeCell] | None = None, **settings: object) -> Result:
    given = DecodeSettings(
        cells=cells or [DecodeCell(SHAPE, 2, 150, 32)],
        blocks=BLOCKS,
        budget_s=0.001,
        combos=[Combination(dict.fromkeys(SLOTS, name), name=name) for name in combos],
        **settings,
    )
    return DecodeBench(given, registry(), {}).run()


@pytest.fixture(scope="module")
def result() -> Result:
    return run("sdpa", "fused", "wrong")


def test_every_subject_has_a_figure_but_the_wrong_one(result):
    found = {m.subject: m for m in result.measurements}
    assert {(m.subject, m.kind) for m in found.values()} == {
        ("sdpa", "combo"),
        ("sdpa, layer step", "layer"),
        ("fused", "combo"),
        ("fused, slots one by one", "combo"),
        ("fused, layer step", "layer"),
        ("wrong", "combo"),
        ("dense SDPA", "dense"),
    }
    for name, m in found.items():
        assert (m.performance is None) == (name == "wrong"), m
        assert (m.phase, m.batch, m.length, m.inputs) == ("decode", 2, 150, "random, pages of 32")
    assert found["wrong"].reason == "not correct: its gate failed"
    assert result.failed
    (gate,) = [g for g in result.gates if not g.ok]
    assert gate.combo == "wrong"
    assert any(line.startswith("win o:") for line in gate.failures)


def test_shares_belong_to_the_slots_and_not_to_the_fused_step(result):
    found = {m.subject: m for m in result.measurements}
    assert not found["fused"].parts
    for name in ("sdpa", "fused, slots one by one"):
        assert list(found[name].parts) == list(SLOTS)
        shares = found[name].shares
        whole = found[name].performance.median_ms
        assert shares == {
            s: part.performance.median_ms / whole for s, part in found[name].parts.items()
        }
    assert result.combos["fused"]["step"] == "fused, fused"
    assert any("it is fused" in line or "itself is fused" in line for _, line in summary(result))


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (["within"], ["as they follow"]),
        (["within graph"], ["as they follow"]),
        (["within events"], ["as they follow"]),
        (["graph"], ["each alone"]),
        (["events"], ["each alone"]),
        (["within graph", "graph"], ["as they follow", "each alone"]),
        ([], []),
    ],
    ids=str,
)
def test_the_note_tells_how_slots_were_timed(result, methods, said):
    """Older result files have each slot alone, and are shown by the same command."""
    (m,) = (m for m in result.measurements if m.subject == "sdpa")

    def timed(method):
        parts = {
            s: dataclasses.replace(p, performance=dataclasses.replace(p.performance, method=method))
            for s, p in m.parts.items()
        }
        return dataclasses.replace(m, parts=parts)

    made = dataclasses.replace(
        result, measurements=[dataclasses.replace(m, parts={}), *map(timed, methods)]
    )
    notes = [line for _, line in summary(made) if line.startswith("slots: ")]
    assert [
        note.split(": ")[1][: len(start)] for note, start in zip(notes, said, strict=True)
    ] == said


def test_the_fused_step_is_judged_too(monkeypatch):
    monkeypatch.setitem(
        globals(), "step", lambda q, gates, *s, call: _swapped(q, gates, *s, call=call)
    )
    made = run("fused")
    assert not made.gates[0].ok
    assert all(line.startswith("decode fused step") for line in made.gates[0].failures)


def _swapped(q, gates, *stores, call, original=step):
    return original(q, gates.flip(-1).contiguous(), *stores, call=call)


def test_table_file_and_comparison(result, tmp_path):
    ((title, columns, rows),) = rows_of(result)
    assert "4/2/16 float32" in title
    assert {len(row) for row in rows} == {len(columns)}
    by_subject = {row[1]: row for row in rows}
    assert by_subject["wrong"][2] == "-"
    assert by_subject["sdpa"][columns.index("select")].endswith("%)")
    assert by_subject["dense SDPA"][columns.index("x dense")] == "1"
    assert by_subject["sdpa, layer step"][columns.index("of floor")] == "-"
    file = tmp_path / "r.json"
    file.write_text(result.to_json())
    assert read_result(file).measurements == result.measurements
    changes = compare(read_result(file), result, fail_over=0.05)
    assert {change.verdict for change in changes} == {"same"}


def test_picture_and_page(result):
    pytest.importorskip("matplotlib")
    from nsa_bench.render.page import page
    from nsa_bench.render.plots import render

    assert render(result, "png").startswith(b"\x89PNG")
    text = page(result)
    assert "slots one by one" in text
    assert "<script" not in text


def test_a_step_of_the_bench_is_one_of_the_plan():
    """Pages lie in random order; the dense view is the same memory."""
    cell = DecodeCell(SHAPE, 3, 70, 64)
    config = layer_config(SHAPE, BLOCKS)
    plan = resolve(config, phase="decode", page_size=64)
    x = make_state(cell, config, torch.float32, "cpu", 0)
    assert x.call.block_table.flatten().tolist() != list(range(6))
    assert sorted(x.call.block_table.flatten().tolist()) == list(range(6))
    seen: list[str] = []
    assert one_by_one(plan, x, seen.append).shape == (3, 1, 4, 16)
    assert seen == list(SLOTS)
    k, v = x.dense
    assert k.shape == v.shape == (3, 70, 2, 16)
    assert k.data_ptr() == x.stores["k_sel"].data_ptr()


def test_costs_count_every_row_once():
    config = layer_config(Shape(64, 4, 128, 128))
    costs = step_costs(config, 32, 65536, 2)
    rows = 32 * 64 * 256 * 2
    assert costs["cmp"].bytes == 32 * 4 * 256 * 4095 * 2 + rows
    assert costs["sel"].bytes == 32 * 4 * 256 * 1024 * 2 + rows
    assert costs["win"].flops == 2 * 32 * 64 * 256 * 512
    assert costs["select"].bytes == 32 * 4 * 128 * 4095 * 2 + 32 * 64 * 128 * 2
    assert costs["total"].bytes == 32 * 4 * 256 * 5631 * 2 + rows + 32 * 64 * 12
    assert costs["dense"].bytes == 32 * 4 * 256 * 65536 * 2 + rows


def test_cells_of_the_devices_and_of_the_options():
    large = [
        (c.batch, c.length, c.page_size) for c in default_cells("cuda") if c.shape.n_heads == 64
    ]
    assert large == [(256, 8192, 128), (32, 65536, 128), (16, 131072, 128)]
    assert [c.length for c in default_cells("cuda")[3:]] == [512, 1024, 2048]
    assert all(c.length <= 2048 for c in default_cells("cpu"))
    assert bench_decode.cells(None, None, 1, None) == []
    made = bench_decode.cells("reports,12/2/64", "1k", 4, 128)
    assert made == [
        DecodeCell(Shape(8, 2, 32, 32), 4, 1024, 128),
        DecodeCell(Shape(12, 2, 64, 64), 4, 1024, 128),
    ]


def test_spread_of_five_repeats():
    def of(samples: list[float]) -> Performance:
        return Performance(1.0, 1.0, 1.0, "events", 1, samples)

    assert spread_of_repeats(of([1.0, 2.0, 3.0, 4.0])) is None
    assert spread_of_repeats(of([1.0, 1.0, 9.0, 2.0, 2.0, 2.0])) == pytest.approx(
        torch.tensor([1.0, 9.0, 2.0, 2.0, 2.0]).std().item() / 3.2
    )


def test_a_shape_class_is_judged_once():
    made = run(
        "sdpa",
        cells=[DecodeCell(SHAPE, 1, 40), DecodeCell(SHAPE, 1, 90), DecodeCell(SHAPE, 1, 40, 32)],
        time_limit_s=0.0,
    )
    assert [gate.case.split("page ")[1] for gate in made.gates] == ["none", "32"]


def test_no_time_leaves_reasons():
    made = run("sdpa", time_limit_s=0.0)
    assert {m.reason for m in made.measurements} == {"not measured: the time limit was reached"}
    assert not made.failed


def test_the_command(nsa, tmp_path):
    file: Path = tmp_path / "r.json"
    done = nsa(
        "bench",
        "--phase",
        "decode",
        "--device",
        "cpu",
        "--shape",
        "4/2/16",
        "--length",
        "100",
        "--batch",
        "2",
        "--blocks",
        "16,8,32,4,32",
        "--page-size",
        "32",
        "--combo",
        "sdpa",
        "--budget",
        "0.001",
        "--json",
        str(file),
    )
    assert done.code == 0, done.err
    assert "sdpa, layer step" in done.out
    assert read_result(file).settings["cells"] == ["4/2/16 B=2 S=100 page 32"]
