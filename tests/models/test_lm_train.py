"""Training: a resumed run is the run, parts and packing change nothing, what goes wrong is said and
loses nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import pickle
import signal
import sys

import pytest
import torch

from nsa_core import InvalidInput
from nsa_core.errors import BackendUnavailable
from nsa_models.lm import checkpoint, log
from nsa_models.lm import train as room
from nsa_models.lm.data import batch_of
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import Data, DataSpec, open_data
from nsa_models.lm.tokens import ByteTokenizer
from nsa_models.lm.train import NotFinite, train
from nsa_models.lm.trainer import Trainer

pytest.importorskip("safetensors")
HERE = World(torch.device("cpu"))
RECIPE = Recipe(steps=6, batch=4, warmup=2, eval_every=3, save_every=2)


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix rate of the machine takes time to measure, and no test is about it."""
    peaks = room.measure_peaks.__globals__["Peaks"](1e9, 1e9)
    monkeypatch.setattr(room, "measure_peaks", lambda *_: peaks)


@pytest.fixture
def trainer(config, rows):
    """``trainer(recipe, kept)`` over the documents, always the same."""

    def make(recipe: Recipe = RECIPE, kept: checkpoint.Checkpoint | None = None) -> Trainer:
        torch.manual_seed(1)
        held_out = list(rows(24, held_out=True, share=0.2, epochs=1))
        data = Data(DataSpec("words", 24), rows(24, share=0.2), held_out, 256, ByteTokenizer())
        return Trainer(
            LanguageModel(config) if kept is None else kept.model(), data, recipe, HERE, kept
        )

    return make


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.step().read()[0] for _ in range(steps)]


def test_three_steps_and_three_more_are_six(trainer, tmp_path):
    whole = trainer()
    expected = losses(whole, 6)
    first = trainer()
    found = losses(first, 3)
    first.save(tmp_path / checkpoint.FILE)
    torch.manual_seed(99)
    second = trainer(kept=checkpoint.read(tmp_path))
    assert torch.equal(torch.get_rng_state(), first_random(tmp_path))
    assert (second.step_number, second.tokens) == (3, 3 * 4 * 24)
    found += losses(second, 3)
    assert found == expected
    for one, other in zip(whole.model.parameters(), second.model.parameters()):
        assert torch.equal(one, other)
        for key, kept in whole.optimizer.state[one].items():
            assert torch.equal(kept, second.optimizer.state[other][key]), key
    assert whole.data.rows.state_dict() == second.data.rows.state_dict()


def first_random(folder: pathlib.Path) -> torch.Tensor:
    return checkpoint.read(folder).tensors["random.cpu"]


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_loop_resumed_is_the_loop(trainer, tmp_path, number, ends):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    whole.mkdir(), parted.mkdir()
    expected = train(trainer(), whole)
    stopped = trainer()
    with pytest.raises(ends) as end:
        train(stopped, parted, lambda p: p.step == 3 and signal.raise_signal(number))
    assert ends is KeyboardInterrupt or end.value.code == 143
    assert stopped.step_number == 4  # the step that was under way
    with open(
        parted / log.FILE, "a"
    ) as file:  # a step that was logged and then lost with its process
        file.write(json.dumps({"step": 5, "loss": 1.0}) + "\n")
    train(trainer(kept=checkpoint.read(parted)), parted)
    (_, one), (_, other) = log.read_log(whole / log.FILE), log.read_log(parted / log.FILE)
    numbers = [
        [(r["step"], r.get("loss"), r.get("held_out_loss")) for r in records]
        for records in (one, other)
    ]
    assert numbers[0] == numbers[1]
    assert [p.step for p in expected] == [0, 1, 2, 3, 4, 5, 6]
    one, other = (checkpoint.read(folder) for folder in (whole, parted))
    assert one.facts == other.facts
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.fixture
def interruptible():
    """Ctrl-C raises, which it does not in a job that a shell put into the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_ends_at_once(trainer, tmp_path, interruptible):
    def twice(progress):
        for _ in range(2):
            # os.kill may hand both to a thread that takes them as one
            signal.raise_signal(signal.SIGINT)

    before, unsaved = signal.getsignal(signal.SIGINT), trainer()
    with pytest.raises(KeyboardInterrupt):
        train(unsaved, tmp_path, twice)
    assert not (tmp_path / checkpoint.FILE).exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stop_that_another_process_was_asked_for(trainer, tmp_path):
    made = trainer()
    step = made.step
    # told with the sums of step 3
    made.step = lambda stopping: step(stopping=made.step_number == 2)
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path)
    assert checkpoint.read(tmp_path).facts["step"] == 3


def test_the_log_says_what_it_is(trainer, tmp_path):
    found = train(trainer(), tmp_path)
    header, records = log.read_log(tmp_path / log.FILE)
    assert (header["kind"], header["schema_version"]) == ("nsa-train-log", 1)
    assert header["train"] == dataclasses.asdict(RECIPE)
    assert [r["step"] for r in records] == list(range(7))
    assert [r["step"] for r in records if "held_out_loss" in r] == [0, 3, 6]
    assert records[6]["held_out_loss"] < records[0]["held_out_loss"]
    for record, progress in zip(records[1:], found[1:]):
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


def test_a_document_that_cannot_be_read_costs_no_step_before_it(trainer, tmp_path):
    recipe = dataclasses.replace(RECIPE, save_every=6)
    made, whole, count = trainer(recipe), losses(trainer(), 6), itertools.count(1)
    read = type(made.data.rows).__next__

    class Broken(type(made.data.rows)):  # where the third step has read two of its four rows
        def __next__(self):
            if next(count) == 11:
                raise InvalidInput("line 7 is no JSON")
            return read(self)

    made.data.rows.__class__ = Broken
    with pytest.raises(InvalidInput, match="line 7"):
        train(made, tmp_path)
    kept = checkpoint.read(tmp_path)
    assert kept.facts["step"] == 2
    assert losses(trainer(kept=kept), 4) == whole[2:]


@pytest.mark.parametrize("at", ["loss", "gradient"])
def test_what_is_not_finite_ends_the_run_and_names_the_step(trainer, tmp_path, at):
    made = trainer()
    step, last = made.step, []

    def broken(stopping):
        done = step(stopping)
        if done.step == 3:
            done.values[0 if at == "loss" else 2] = math.nan
        last.append(done.step)
        return done

    made.step = broken
    with pytest.raises(NotFinite, match="step 3: the loss is"):
        train(made, tmp_path)
    assert last == [1, 2, 3]
    assert checkpoint.read(tmp_path).facts["step"] == 2


def test_accumulated_parts_are_the_step(trainer):
    expected = losses(trainer(), 3)
    for parts in (2, 4):
        assert losses(trainer(dataclasses.replace(RECIPE, accumulate=parts)), 3) == pytest.approx(
            expected, abs=1e-5
        )
    with pytest.raises(
        InvalidInput, match="batch 4 does not divide over accumulate 3 x 1 processes"
    ):
        trainer(dataclasses.replace(RECIPE, accumulate=3))


def test_report_row_6_packed_rows_train_as_rows_do(config, attention):
    """Rows of one document each, as [B, S] and as packed documents: the same loss over 20 steps."""
    found = []
    for packed in (False, True):
        torch.manual_seed(0)
        data = open_data(DataSpec("uniform", 24, vocab_size=256))
        data.rows.packed = packed
        recipe = Recipe(steps=20, batch=2, warmup=2)
        trainer = Trainer(
            LanguageModel(dataclasses.replace(config, attention=attention)), data, recipe, HERE
        )
        found.append(losses(trainer, 20))
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    assert found[0] != found[0][:1] * 20


def test_the_loss_is_that_of_all_targets(trainer):
    made = trainer()
    rows = [next(made.data.rows) for _ in range(4)]
    made.data.rows.load_state_dict({"epoch": 0, "document": 0, "offset": 0})
    batch = batch_of(rows, packed=True)
    expected = (
        made.model(batch.tokens, batch.cu_seqlens, batch.max_seqlen, batch.targets).item()
        / batch.counted
    )
    assert made.step().read()[0] == pytest.approx(expected, rel=1e-6)
    apart = [batch_of([row], packed=True) for row in made.data.held_out]
    total = sum(made.model(b.tokens, b.cu_seqlens, b.max_seqlen, b.targets).item() for b in apart)
    assert made.held_out_loss() == pytest.approx(total / sum(b.counted for b in apart), rel=1e-5)


def test_gradients_are_clipped_and_the_norm_is_told(trainer):
    made = trainer(dataclasses.replace(RECIPE, clip=1e-3))
    norm = made.step().read()[2]
    left = torch.stack([p.grad.norm() for p in made.model.parameters()]).norm().item()
    assert norm > 0.1
    assert left == pytest.approx(1e-3, rel=1e-2)


def test_the_learning_rate_rises_and_falls():
    recipe = Recipe(steps=101, learning_rate=1.0, warmup=10, final_rate=0.1)
    rates = [recipe.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not(trainer):
    made = trainer()
    decays, plain = made.optimizer.param_groups
    assert (decays["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() > 1 for p in decays["params"]} == {True}
    assert {p.dim() > 1 for p in plain["params"]} == {False}
    assert len(decays["params"]) + len(plain["params"]) == len(list(made.model.parameters()))


def test_every_wrong_field_of_a_recipe_is_named():
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
    for said in (
        "steps must",
        "learning_rate must",
        "warmup must",
        "beta1 must",
        "beta2 must",
        "got 'int8'",
        "got 'tensor'",
    ):
        assert said in str(caught.value)
    with pytest.raises(InvalidInput, match="graph=True needs one process on one GPU, got"):
        Trainer(None, None, Recipe(graph=True), HERE)


def test_a_checkpoint_that_is_none_is_refused(trainer, tmp_path, monkeypatch):
    file = tmp_path / checkpoint.FILE
    with pytest.raises(InvalidInput, match="cannot be read as a checkpoint"):
        checkpoint.read(tmp_path)
    file.write_bytes(pickle.dumps({"model": 1}))
    with pytest.raises(InvalidInput, match="cannot be read as a checkpoint"):
        checkpoint.read(tmp_path)
    trainer().save(file)
    whole = file.read_bytes()
    monkeypatch.setattr(checkpoint, "FORMAT", "another 2")
    with pytest.raises(InvalidInput, match="is no 'another 2'"):
        checkpoint.read(tmp_path)
    file.write_bytes(whole[:-50])
    with pytest.raises(InvalidInput, match="cannot be read as a checkpoint"):
        checkpoint.read(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(BackendUnavailable, match="pip install"):
        checkpoint.read(tmp_path)
