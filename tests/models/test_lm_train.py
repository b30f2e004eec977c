"""Training: exact resumption, equal losses over parts and packing, clipping and rates."""

from __future__ import annotations

import dataclasses
import functools
import math
import time

import pytest
import torch

from nsa_bench.roofline import Peaks
from nsa_core import InvalidInput
from nsa_models.lm import log
from nsa_models.lm import train as train_module
from nsa_models.lm.data import batch_of
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import CONFIG
from nsa_models.lm.train import train
from nsa_models.lm.trainer import StepResult, Trainer
from training_cases import LENGTH, trainer_of

HERE = World(torch.device("cpu"))
RECIPE = {"steps": 6, "batch": 4, "accumulate": 1, "warmup": 2, "eval_every": 3, "save_every": 2}
TOKENS = 4 * LENGTH  # of a step
pytestmark = pytest.mark.usefixtures("no_timing")
trainer = functools.partial(trainer_of, 0, 1)


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.step().read()[0] for _ in range(steps)]


def test_three_steps_resumed_for_three_equal_six_steps(tmp_path):
    uninterrupted = trainer(**RECIPE)
    expected = losses(uninterrupted, 6)
    first = trainer(**RECIPE)
    resumed_losses = losses(first, 3)
    first.save(tmp_path)
    torch.manual_seed(99)
    second = trainer(resume=tmp_path, **RECIPE)
    assert (second.step_number, second.tokens) == (3, 3 * TOKENS)
    resumed_losses += losses(second, 3)
    assert resumed_losses == expected
    for one, other in zip(uninterrupted.model.parameters(), second.model.parameters()):
        assert torch.equal(one, other)
        for key, value in uninterrupted.optimizer.state[one].items():
            assert torch.equal(value, second.optimizer.state[other][key]), key
    assert uninterrupted.lanes.state() == second.lanes.state()


@pytest.mark.slow
def test_the_log_has_a_header_and_every_step(tmp_path):
    reported = train(trainer(**RECIPE), tmp_path)
    header, records = log.read_log(tmp_path / log.FILE)
    assert (header["kind"], header["schema_version"]) == ("nsa-train-log", 1)
    assert header["train"] == dataclasses.asdict(Recipe(**RECIPE, clip=0.5))
    assert [r["step"] for r in records] == list(range(7))
    assert [r["step"] for r in records if "held_out_loss" in r] == [0, 3, 6]
    assert records[6]["held_out_loss"] < records[0]["held_out_loss"]
    for record, progress in zip(records[1:], reported[1:]):
        assert {
            "loss",
            "learning_rate",
            "grad_norm",
            "tokens_per_s",
            "matrix_share",
            "memory_bytes",
        } <= record.keys()
        assert record["loss"] == progress.loss
        assert record["tokens"] == record["step"] * TOKENS
        share = record["tokens_per_s"] * header["flops_per_token"] / header["matrix_flops_per_s"]
        assert math.isclose(record["matrix_share"], share)
    with pytest.raises(InvalidInput, match="cannot be read as a log"):
        log.read_log(tmp_path / CONFIG)


def test_the_speed_of_a_step_comes_from_its_own_time(tmp_path, monkeypatch):
    # On a GPU the results of an evaluated step are read at another time than those of others.
    monkeypatch.setattr(StepResult, "seconds", lambda self: 0.5 * self.step)
    reported = train(trainer(**RECIPE), tmp_path)
    assert [p.tokens_per_s for p in reported[1:]] == [TOKENS / (0.5 * n) for n in range(1, 7)]


def test_the_time_of_a_step_holds_its_rows_but_no_evaluation(tmp_path, monkeypatch):
    slow = trainer(**RECIPE)
    step_of_lanes, evaluate = slow.lanes.step, slow.held_out_loss

    def after_a_pause(function, seconds):
        time.sleep(seconds)
        return function()

    monkeypatch.setattr(slow.lanes, "step", lambda: after_a_pause(step_of_lanes, 0.05))
    monkeypatch.setattr(slow, "held_out_loss", lambda: after_a_pause(evaluate, 0.5))
    for progress in train(slow, tmp_path)[1:]:
        assert TOKENS / 0.5 < progress.tokens_per_s <= TOKENS / 0.05


def test_a_share_above_the_matrix_rate_is_a_failed_measurement(tmp_path, monkeypatch):
    peaks = Peaks(1.0, 1.0)
    monkeypatch.setattr(train_module, "measure_peaks", lambda *_: peaks)
    reported = train(trainer(**RECIPE), tmp_path)
    assert {p.matrix_share for p in reported} == {None}
    assert not any("matrix_share" in r for r in log.read_log(tmp_path / log.FILE)[1])


@pytest.mark.slow
def test_accumulation_has_the_losses_of_undivided_steps():
    expected = losses(trainer(**RECIPE), 3)
    for parts in (2, 4):
        assert losses(trainer(**RECIPE | {"accumulate": parts}), 3) == pytest.approx(
            expected, abs=1e-5
        )
    with pytest.raises(
        InvalidInput, match="batch 4 does not divide over accumulate 3 x 1 processes"
    ):
        trainer(**RECIPE | {"accumulate": 3})


@pytest.mark.slow
def test_the_loss_is_the_mean_over_all_targets():
    fresh = trainer(**RECIPE)
    rows = [next(fresh.data.rows.lane(number, 4)) for number in range(4)]
    batch = batch_of(rows, packed=True)
    expected = (
        fresh.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen, batch.targets).item()
        / batch.counted
    )
    assert fresh.step().read()[0] == pytest.approx(expected, rel=1e-6)
    batches = [batch_of([row], packed=True) for row in fresh.data.held_out]
    total = sum(
        fresh.model(b.tokens, b.cu_seqlens, b.max_seqlen, b.targets).item() for b in batches
    )
    assert fresh.held_out_loss() == pytest.approx(total / sum(b.counted for b in batches), rel=1e-5)


def test_gradients_are_clipped_and_the_norm_before_is_reported():
    clipping = trainer(**RECIPE | {"clip": 1e-3})
    norm = clipping.step().read()[2]
    norm_after = torch.stack([p.grad.norm() for p in clipping.model.parameters()]).norm().item()
    assert norm > 0.1
    assert norm_after == pytest.approx(1e-3, rel=1e-2)


def test_the_learning_rate_ramps_up_and_follows_a_cosine():
    recipe = Recipe(steps=101, learning_rate=1.0, warmup=10, final_rate=0.1)
    rates = [recipe.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_only_matrices_have_weight_decay():
    fresh = trainer(**RECIPE)
    decays, plain = fresh.optimizer.param_groups
    assert (decays["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() > 1 for p in decays["params"]} == {True}
    assert {p.dim() > 1 for p in plain["params"]} == {False}
    assert len(decays["params"]) + len(plain["params"]) == len(list(fresh.model.parameters()))


def test_the_error_names_every_wrong_field_of_a_recipe():
    with pytest.raises(InvalidInput) as caught:
        Recipe(
            steps=0,
            learning_rate=math.nan,
            warmup=-1,
            beta1=1.0,
            beta2=1.5,
            precision="int8",
            parallel="tensor",
        )
    for text in (
        "steps must",
        "learning_rate must",
        "warmup must",
        "beta1 must",
        "beta2 must",
        "got 'int8'",
        "got 'tensor'",
    ):
        assert text in str(caught.value)
    with pytest.raises(InvalidInput, match="graph=True needs one process on one GPU, got"):
        Trainer(None, None, Recipe(graph=True), HERE)
