"""The decode benchmark: gates, whole and fused steps, slots, a layer's step, dense attention."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nsa_backend_sdpa import combine, decode
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_bench.compare import compare
from nsa_bench.decode import DecodeBench
from nsa_bench.decode_workloads import make_state, one_by_one, step_costs, step_workloads
from nsa_bench.render.summary import summary
from nsa_bench.render.tables import rows_of
from nsa_bench.result import Result, read_result
from nsa_bench.settings import DecodeCell, DecodeSettings, default_cells, layer_config
from nsa_bench.shapes import Shape
from nsa_bench.timing import Performance, spread_of_repeats
from nsa_cli import bench_decode
from nsa_core.contract import SLOTS, SlotCall
from nsa_core.plan.plan import resolve
from nsa_core.plan.registry import Registry
from nsa_verify.problems.combination import Combination

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
    decode_settings = DecodeSettings(
        cells=cells or [DecodeCell(SHAPE, 2, 150, 32)],
        blocks=BLOCKS,
        budget_s=0.001,
        combos=[Combination(dict.fromkeys(SLOTS, name), name=name) for name in combos],
        **settings,
    )
    return DecodeBench(decode_settings, registry(), {}).run()


@pytest.fixture(scope="module")
def result() -> Result:
    return run("sdpa", "fused", "wrong")


@pytest.mark.slow
def test_every_correct_subject_is_timed(result):
    by_subject = {m.subject: m for m in result.measurements}
    assert {(m.subject, m.kind) for m in by_subject.values()} == {
        ("sdpa", "combo"),
        ("sdpa, layer step", "layer"),
        ("fused", "combo"),
        ("fused, slots one by one", "combo"),
        ("fused, layer step", "layer"),
        ("wrong", "combo"),
        ("dense SDPA", "dense"),
    }
    for name, m in by_subject.items():
        assert (m.performance is None) == (name == "wrong"), m
        assert (m.phase, m.batch, m.length, m.inputs) == ("decode", 2, 150, "random, pages of 32")
    assert by_subject["wrong"].reason == "not correct: its gate failed"
    assert result.failed
    (gate,) = [g for g in result.gates if not g.ok]
    assert gate.combo == "wrong"
    assert any(line.startswith("win o:") for line in gate.failures)


def test_only_steps_run_slot_by_slot_have_shares(result):
    by_subject = {m.subject: m for m in result.measurements}
    assert not by_subject["fused"].parts
    for name in ("sdpa", "fused, slots one by one"):
        parts = by_subject[name].parts
        assert list(parts) == list(SLOTS)
        # times of a loaded machine may add up to more than the step
        step = dataclasses.replace(
            by_subject[name].performance,
            median_ms=sum(part.performance.median_ms for part in parts.values()),
        )
        m = dataclasses.replace(by_subject[name], performance=step)
        assert result.shares(m) == {
            s: part.performance.median_ms / step.median_ms for s, part in parts.items()
        }
    assert result.combos["fused"]["step"] == "fused, fused"
    assert any("The step itself is fused" in line for _, line in summary(result))


def test_a_note_states_how_slots_were_timed(result):
    without = [dataclasses.replace(m, parts={}) for m in result.measurements]
    for measurements, count in ((result.measurements, 1), (without, 0)):
        lines = summary(dataclasses.replace(result, measurements=measurements))
        notes = [line for _, line in lines if line.startswith("slots: timed within a step")]
        assert len(notes) == count


def test_a_wrong_fused_step_fails_its_gate(monkeypatch):
    monkeypatch.setitem(
        globals(), "step", lambda q, gates, *s, call: _swapped(q, gates, *s, call=call)
    )
    result = run("fused")
    assert not result.gates[0].ok
    assert all(line.startswith("decode fused step") for line in result.gates[0].failures)


def _swapped(q, gates, *stores, call, original=step):
    return original(q, gates.flip(-1).contiguous(), *stores, call=call)


def test_a_decode_result_is_tabulated_saved_and_compared(result, tmp_path):
    ((title, columns, rows),) = rows_of(result)
    assert "4/2/16 float32" in title
    assert {len(row) for row in rows} == {len(columns)}
    by_subject = {row[2]: dict(zip(columns, row)) for row in rows}
    assert by_subject["wrong"]["ms"] == "-"
    assert float(by_subject["sdpa"]["select ms"]) > 0
    assert by_subject["dense SDPA"]["x dense"] == "1.00"
    assert by_subject["sdpa, layer step"]["% of floor"] == "-"
    file = tmp_path / "r.json"
    file.write_text(result.to_json())
    assert read_result(file).measurements == result.measurements
    changes = compare(read_result(file), result, fail_over=0.05)
    assert {change.verdict for change in changes} == {"same"}


@pytest.mark.parametrize(("part_ms", "shown"), [(0.1, True), (3.0, False)])
def test_shares_have_columns_only_if_the_times_of_the_slots_add_up(result, part_ms, shown):
    def timed(part, ms):
        time = part.performance and dataclasses.replace(part.performance, median_ms=ms)
        return dataclasses.replace(part, performance=time)

    measurements = [
        dataclasses.replace(
            timed(m, 1.0), parts={name: timed(part, part_ms) for name, part in m.parts.items()}
        )
        for m in result.measurements
    ]
    ((_, columns, rows),) = rows_of(dataclasses.replace(result, measurements=measurements))
    assert ("select %" in columns, "sum %" in columns) == (shown, shown)
    (row,) = (row for row in rows if row[2] == "sdpa")
    assert not shown or row[columns.index("select %")] == "10"


@pytest.mark.slow
def test_a_decode_result_is_drawn(result):
    pytest.importorskip("matplotlib")
    from nsa_bench.render.page import page
    from nsa_bench.render.plots import render

    assert render(result, "png").startswith(b"\x89PNG")
    text = page(result)
    assert "slots one by one" in text
    assert "<figcaption>Time of a step</figcaption>" in text


def test_a_step_runs_every_slot_of_the_plan_on_a_paged_cache():
    """Pages are in random order; dense attention uses the same memory."""
    cell = DecodeCell(SHAPE, 3, 70, 64).of("float32", BLOCKS)
    plan = resolve(cell.config, phase="decode", page_size=64)
    x = make_state(cell, "cpu", 0)
    assert x.call.tables.sel.flatten().tolist() != list(range(6))
    assert sorted(x.call.tables.sel.flatten().tolist()) == list(range(6))
    seen: list[str] = []
    assert one_by_one(plan, x, seen.append).shape == (3, 1, 4, 16)
    assert seen == list(SLOTS)
    k, v = x.dense
    assert k.shape == v.shape == (3, 70, 2, 16)
    assert k.data_ptr() == x.stores["k_sel"].data_ptr()


def test_step_costs_count_every_row_once():
    config = layer_config(Shape(64, 4, 128, 128))
    costs = step_costs(config, 32, 65536, 2)
    rows = 32 * 64 * 256 * 2
    assert costs["cmp"].bytes == 32 * 4 * 256 * 4095 * 2 + rows
    assert costs["sel"].bytes == 32 * 4 * 256 * 1024 * 2 + rows
    assert costs["win"].flops == 2 * 32 * 64 * 256 * 512
    assert costs["select"].bytes == 32 * 4 * 128 * 4095 * 2 + 32 * 64 * 128 * 2
    assert costs["total"].bytes == 32 * 4 * 256 * 5631 * 2 + rows + 32 * 64 * 12
    assert costs["dense"].bytes == 32 * 4 * 256 * 65536 * 2 + rows


def test_the_layers_step_alone_has_state():
    cell = DecodeCell(SHAPE, 1, 40).of("float32", BLOCKS)
    plan = resolve(cell.config, phase="decode", backends="sdpa", registry=registry())
    work = step_workloads("sdpa", plan, lambda: make_state(cell, "cpu", 0), cell, "cpu")
    assert [(w.key, w.has_state) for w in work] == [("sdpa", False), ("sdpa, layer step", True)]


def test_default_cells_and_cells_from_options():
    large = [
        (c.batch, c.length, c.page_size) for c in default_cells("cuda") if c.shape.n_heads == 64
    ]
    assert large == [(256, 8192, 128), (32, 65536, 128), (16, 131072, 128)]
    small = [2048, 4096, 8192]  # beyond n * l' = 1024: a step does not select every block
    assert [c.length for c in default_cells("cuda")[3:]] == small
    assert [c.length for c in default_cells("cpu")] == [*small, 2048]
    assert [c.length for c in bench_decode.cells("reports", None, None, None)] == small
    assert bench_decode.cells(None, None, None, None) == []
    chosen = bench_decode.cells("reports,12/2/64", "1k", 4, 128)
    assert chosen == [
        DecodeCell(Shape(8, 2, 32, 32), 4, 1024, 128),
        DecodeCell(Shape(12, 2, 64, 64), 4, 1024, 128),
    ]


def test_spread_of_repeats_uses_the_medians_of_five_runs():
    def with_samples(samples: list[float]) -> Performance:
        return Performance(1.0, 1.0, 1.0, "events", samples)

    assert spread_of_repeats(with_samples([1.0, 2.0, 3.0, 4.0])) is None
    assert spread_of_repeats(with_samples([1.0, 1.0, 9.0, 2.0, 2.0, 2.0])) == pytest.approx(
        torch.tensor([1.0, 9.0, 2.0, 2.0, 2.0]).std().item() / 3.2
    )


@pytest.mark.slow
def test_each_shape_and_page_size_is_judged_once(monkeypatch):
    monkeypatch.setattr(DecodeBench, "_measure_cell", lambda *_: None)
    result = run(
        "sdpa",
        cells=[DecodeCell(SHAPE, 1, 40), DecodeCell(SHAPE, 1, 90), DecodeCell(SHAPE, 1, 40, 32)],
    )
    assert [gate.case.split("page ")[1] for gate in result.gates] == ["none", "32"]


def test_cells_after_the_time_limit_have_a_reason():
    result = run("sdpa", time_limit_s=0.0)
    assert {m.reason for m in result.measurements} == {"not measured: the time limit was reached"}
    assert not result.failed
    assert result.timed_nothing


def test_a_cache_that_exceeds_the_memory_is_not_allocated(monkeypatch):
    monkeypatch.setattr("nsa_bench.limits._memory_bytes", lambda device: 1 << 30)
    monkeypatch.setattr("nsa_bench.decode.make_state", None)
    result = run("sdpa", "wrong", cells=[DecodeCell(SHAPE, 3, 2**31 - 1)])
    # 2 * (16 + 16) * 4 bytes a token, and q and o
    reason = "out of memory: a call needs at least 1,536.0 GiB, and cpu has 1.0 GiB"
    reasons = {m.subject: m.reason for m in result.measurements}
    assert reasons == {"sdpa": reason, "wrong": "not correct: its gate failed"}
    assert result.timed_nothing


@pytest.mark.slow
def test_the_decode_command_times_and_saves(nsa, tmp_path):
    file: Path = tmp_path / "r.json"
    done = nsa(
        "bench",
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
