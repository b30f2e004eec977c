"""Training: exact resumption, equal losses over parts and packing, and errors without data loss."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import pathlib
import pickle
import signal
import sys
import tempfile
import time

import pytest
import torch

from nsa_bench.roofline import Peaks
from nsa_core import InvalidInput
from nsa_core.errors import BackendUnavailable
from nsa_core.util import interruption
from nsa_core.util.atomic_files import NotWritten
from nsa_models.lm import checkpoint, log
from nsa_models.lm import train as train_module
from nsa_models.lm.data import TextRows, batch_of
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import Data, DataSpec, open_data
from nsa_models.lm.tokens import ByteTokenizer
from nsa_models.lm.train import NotFinite, train
from nsa_models.lm.trainer import StepResult, Trainer

pytest.importorskip("safetensors")
HERE = World(torch.device("cpu"))
RECIPE = Recipe(steps=6, batch=4, warmup=2, eval_every=3, save_every=2)


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow measurement of the machine's matrix rate."""
    peaks = Peaks(1e9, 1e9)
    monkeypatch.setattr(train_module, "measure_peaks", lambda *_: peaks)


@pytest.fixture
def trainer(config, rows):
    """Return ``trainer(recipe, resume_from)``, which trains deterministically on the documents."""

    def make(recipe: Recipe = RECIPE, resume_from: checkpoint.Checkpoint | None = None) -> Trainer:
        torch.manual_seed(1)
        held_out = list(rows(24, held_out=True, share=0.2, epochs=1))
        data = Data(DataSpec("words", 24), rows(24, share=0.2), held_out, 256, ByteTokenizer())
        return Trainer(
            LanguageModel(config) if resume_from is None else resume_from.model(),
            data,
            recipe,
            HERE,
            resume_from,
        )

    return make


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.step().read()[0] for _ in range(steps)]


@pytest.mark.slow
def test_three_steps_resumed_for_three_equal_six_steps(trainer, tmp_path):
    uninterrupted = trainer()
    expected = losses(uninterrupted, 6)
    first = trainer()
    resumed_losses = losses(first, 3)
    first.save(tmp_path / checkpoint.FILE)
    torch.manual_seed(99)
    second = trainer(resume_from=checkpoint.read(tmp_path))
    assert torch.equal(torch.get_rng_state(), saved_random_state(tmp_path))
    assert (second.step_number, second.tokens) == (3, 3 * 4 * 24)
    resumed_losses += losses(second, 3)
    assert resumed_losses == expected
    for one, other in zip(uninterrupted.model.parameters(), second.model.parameters()):
        assert torch.equal(one, other)
        for key, value in uninterrupted.optimizer.state[one].items():
            assert torch.equal(value, second.optimizer.state[other][key]), key
    assert uninterrupted.lanes.state() == second.lanes.state()


def saved_random_state(folder: pathlib.Path) -> torch.Tensor:
    return checkpoint.read(folder).tensors["random.cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(trainer, tmp_path, number):
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    uninterrupted.mkdir(), resumed.mkdir()
    expected = train(trainer(), uninterrupted)
    stopped = trainer()
    with pytest.raises(KeyboardInterrupt, match=number.name):
        train(stopped, resumed, lambda p: p.step == 3 and signal.raise_signal(number))
    assert stopped.step_number == 4  # the current step is finished
    # A step that was logged before its process was killed.
    with open(resumed / log.FILE, "a") as file:
        file.write(json.dumps({"step": 5, "loss": 1.0}) + "\n")
    train(trainer(resume_from=checkpoint.read(resumed)), resumed)
    (_, one), (_, other) = log.read_log(uninterrupted / log.FILE), log.read_log(resumed / log.FILE)
    numbers = [
        [(r["step"], r.get("loss"), r.get("held_out_loss")) for r in records]
        for records in (one, other)
    ]
    assert numbers[0] == numbers[1]
    assert [p.step for p in expected] == [0, 1, 2, 3, 4, 5, 6]
    one, other = (checkpoint.read(folder) for folder in (uninterrupted, resumed))
    assert one.facts == other.facts
    first, second = one.tensors, other.tensors
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def interruptible():
    """Make SIGINT raise KeyboardInterrupt; jobs that a shell runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_ends_at_once(trainer, tmp_path, interruptible, monkeypatch):
    monkeypatch.setattr(interruption, "_SAME_S", 0.0)

    def twice(progress):
        for _ in range(2):
            # os.kill could merge the two signals into one
            signal.raise_signal(signal.SIGINT)

    before, unsaved = signal.getsignal(signal.SIGINT), trainer()
    with pytest.raises(KeyboardInterrupt):
        train(unsaved, tmp_path, twice)
    assert not (tmp_path / checkpoint.FILE).exists()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_stop_signal_of_another_process_ends_the_run(trainer, tmp_path):
    stopped = trainer()
    step = stopped.step
    # Reported with the sums of step 3.
    stopped.step = lambda stopping: step(stopping=stopped.step_number == 2)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, tmp_path)
    assert checkpoint.read(tmp_path).facts["step"] == 3


@pytest.mark.slow
def test_the_log_has_a_header_and_every_step(trainer, tmp_path):
    reported = train(trainer(), tmp_path)
    header, records = log.read_log(tmp_path / log.FILE)
    assert (header["kind"], header["schema_version"]) == ("nsa-train-log", 1)
    assert header["train"] == dataclasses.asdict(RECIPE)
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
        assert record["tokens"] == record["step"] * 4 * 24
        share = record["tokens_per_s"] * header["flops_per_token"] / header["matrix_flops_per_s"]
        assert math.isclose(record["matrix_share"], share)
    with pytest.raises(InvalidInput, match="cannot be read as a log"):
        log.read_log(tmp_path / checkpoint.FILE)


def test_the_speed_of_a_step_comes_from_its_own_time(trainer, tmp_path, monkeypatch):
    # On a GPU the results of an evaluated step are read at another time than those of others.
    monkeypatch.setattr(StepResult, "seconds", lambda self: 0.5 * self.step)
    reported = train(trainer(), tmp_path)
    assert [p.tokens_per_s for p in reported[1:]] == [4 * 24 / (0.5 * n) for n in range(1, 7)]


def test_the_time_of_a_step_holds_its_rows_but_no_evaluation(trainer, tmp_path, monkeypatch):
    slow = trainer()
    step_of_lanes, evaluate = slow.lanes.step, slow.held_out_loss

    def after_a_pause(function, seconds):
        time.sleep(seconds)
        return function()

    monkeypatch.setattr(slow.lanes, "step", lambda: after_a_pause(step_of_lanes, 0.05))
    monkeypatch.setattr(slow, "held_out_loss", lambda: after_a_pause(evaluate, 0.5))
    tokens = 4 * 24
    for progress in train(slow, tmp_path)[1:]:
        assert tokens / 0.5 < progress.tokens_per_s <= tokens / 0.05


def test_a_share_above_the_matrix_rate_is_a_failed_measurement(trainer, tmp_path, monkeypatch):
    peaks = Peaks(1.0, 1.0)
    monkeypatch.setattr(train_module, "measure_peaks", lambda *_: peaks)
    reported = train(trainer(), tmp_path)
    assert {p.matrix_share for p in reported} == {None}
    assert not any("matrix_share" in r for r in log.read_log(tmp_path / log.FILE)[1])


@pytest.mark.slow
def test_steps_before_an_unreadable_document_are_saved(trainer, tmp_path, monkeypatch):
    recipe = dataclasses.replace(RECIPE, save_every=6)
    failing, expected, count = trainer(recipe), losses(trainer(), 6), itertools.count(1)
    read = TextRows.__next__

    def broken(self):  # fails after two of the third step's four rows
        if next(count) == 11:
            raise InvalidInput("line 7 is not JSON")
        return read(self)

    monkeypatch.setattr(TextRows, "__next__", broken)
    with pytest.raises(InvalidInput, match="line 7"):
        train(failing, tmp_path)
    saved = checkpoint.read(tmp_path)
    assert saved.facts["step"] == 2
    assert losses(trainer(resume_from=saved), 4) == expected[2:]


@pytest.mark.few_cases("loss")
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_loss_or_gradient_ends_the_run(trainer, tmp_path, where):
    failing = trainer()
    step, steps = failing.step, []

    def broken(stopping):
        result = step(stopping)
        if result.step == 3:
            result.values[0 if where == "loss" else 2] = math.nan
        steps.append(result.step)
        return result

    failing.step = broken
    with pytest.raises(NotFinite, match="step 3: the loss is"):
        train(failing, tmp_path)
    assert steps == [1, 2, 3]
    assert checkpoint.read(tmp_path).facts["step"] == 2


@pytest.mark.slow
def test_accumulation_has_the_losses_of_undivided_steps(trainer):
    expected = losses(trainer(), 3)
    for parts in (2, 4):
        assert losses(trainer(dataclasses.replace(RECIPE, accumulate=parts)), 3) == pytest.approx(
            expected, abs=1e-5
        )
    with pytest.raises(
        InvalidInput, match="batch 4 does not divide over accumulate 3 x 1 processes"
    ):
        trainer(dataclasses.replace(RECIPE, accumulate=3))


@pytest.mark.few_cases("dense")
def test_report_row_6_packed_rows_have_the_losses_of_separate_rows(config, attention):
    """Rows with one document each have equal losses as [B, S] and packed, over 20 steps."""
    curves = []
    for packed in (False, True):
        torch.manual_seed(0)
        data = open_data(DataSpec("uniform", 24, vocab_size=256))
        data.rows.packed = packed
        recipe = Recipe(steps=20, batch=2, warmup=2)
        trainer = Trainer(
            LanguageModel(dataclasses.replace(config, attention=attention)), data, recipe, HERE
        )
        curves.append(losses(trainer, 20))
    assert curves[0] == pytest.approx(curves[1], abs=1e-3)
    assert curves[0] != curves[0][:1] * 20


@pytest.mark.slow
def test_the_loss_is_the_mean_over_all_targets(trainer):
    fresh = trainer()
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


def test_gradients_are_clipped_and_the_norm_before_is_reported(trainer):
    clipping = trainer(dataclasses.replace(RECIPE, clip=1e-3))
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


def test_only_matrices_have_weight_decay(trainer):
    fresh = trainer()
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


def test_files_that_are_not_checkpoints_are_refused(trainer, tmp_path, monkeypatch):
    file = tmp_path / checkpoint.FILE
    with pytest.raises(InvalidInput, match="cannot be read as a checkpoint"):
        checkpoint.read(tmp_path)
    file.write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(InvalidInput, match="cannot be read as a checkpoint"):
        checkpoint.read(tmp_path)
    trainer().save(file)
    content = file.read_bytes()
    monkeypatch.setattr(checkpoint, "FORMAT", "another 2")
    with pytest.raises(InvalidInput, match="is no 'another 2'"):
        checkpoint.read(tmp_path)
    file.write_bytes(content[:-50])
    with pytest.raises(InvalidInput, match="cannot be read as a checkpoint"):
        checkpoint.read(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(BackendUnavailable, match="pip install"):
        checkpoint.read(tmp_path)


class TwoProcesses(World):
    """The first of two processes; the second one answers with an empty text."""

    def collect(self, value):
        return [value, ""]


def test_without_a_temporary_folder_the_first_error_of_a_save_is_raised(
    trainer, tmp_path, monkeypatch
):
    """The first process creates the folder; it must tell the others if it cannot."""
    path, instance = tmp_path / "run" / checkpoint.FILE, trainer()
    instance.world = TwoProcesses(torch.device("cpu"), 0, 2)

    def write(file, *_):
        raise NotWritten(errno.ENOSPC, "No space left on device", str(file))

    def no_folder(prefix):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(checkpoint, "write", write)
    monkeypatch.setattr(tempfile, "mkdtemp", no_folder)
    with pytest.raises(NotWritten, match=f"could not write {path}: No space left"):
        instance.save(path)
    assert instance.rescued is None
