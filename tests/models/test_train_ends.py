"""No end of a training loses complete steps, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
import pathlib
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nsa_core import InvalidInput
from nsa_core.util import atomic_files, interruption
from nsa_models.lm import log, saving
from nsa_models.lm.data import TextRows
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.run_folder import INDEX
from nsa_models.lm.train import NotFinite, train
from nsa_models.lm.trainer import NotSaved, StepResult, Trainer
from training_cases import are_equal, tensors_of, trainer_of

STEPS = 6
# No save before the end.
RECIPE = {"steps": STEPS, "eval_every": 3, "save_every": STEPS}
Plant = Callable[[pytest.MonkeyPatch, Trainer], object]
pytestmark = pytest.mark.usefixtures("no_timing")


@pytest.fixture(autouse=True)
def _sigint() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt; jobs that a shell runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclasses.dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its folder, its records, and PyTorch's random state after each step."""

    folder: pathlib.Path
    records: list[dict[str, Any]]
    random: dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder, random = tmp_path_factory.mktemp("uninterrupted"), {}
    trainer = trainer_of(0, 1, **RECIPE)
    train(trainer, folder, lambda p: random.update({p.step: torch.get_rng_state()}))
    return Reference(folder, log.read_log(folder / log.FILE)[1], random)


def losses(records: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    return [(record["step"], record.get("loss")) for record in records]


def on_call(number: int, error: BaseException | None, function: Callable, *, act: Any = None):
    """Return the function, which raises the error at this call, or does ``act`` before it."""
    calls = itertools.count(1)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            if error is not None:
                raise error
            act()
        return function(*arguments, **options)

    return wrapped


def forward(error: BaseException) -> Plant:
    # Two forwards per step: the second one of step 5.
    return lambda patch, trainer: patch.setattr(
        trainer.replica, "forward", on_call(10, error, trainer.replica.forward)
    )


def evaluation(error: BaseException) -> Plant:
    # Before training, and in step 3.
    return lambda patch, trainer: patch.setattr(
        trainer, "held_out_loss", on_call(2, error, trainer.held_out_loss)
    )


def of_log(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def full(self: log.Log, record: dict[str, Any]) -> None:
        with atomic_files.writing(self._path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write, calls = log.Log.write, itertools.count()
    patch.setattr(log.Log, "write", lambda *given: (full if next(calls) == 4 else write)(*given))


def of_rows(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    error = InvalidInput("line 7 is not JSON")  # after two of the four rows of step 3
    patch.setattr(TextRows, "__next__", on_call(11, error, TextRows.__next__))


def received(number: signal.Signals) -> Plant:
    # In the log of step 3; the loop sees it in step 4, and finishes that.
    return lambda patch, trainer: patch.setattr(
        log.Log, "write", on_call(4, None, log.Log.write, act=lambda: signal.raise_signal(number))
    )


# end -> (how it is caused, class of the error, its text, the last complete step)
ENDS: dict[str, tuple[Plant, type[BaseException], str, int]] = {
    **{
        name: (received(getattr(signal, name)), KeyboardInterrupt, name, 4)
        for name in ("SIGINT", "SIGTERM", "SIGHUP")
    },
    "memory": (forward(MemoryError("planted")), MemoryError, "planted", 4),
    "memory of a GPU": (
        forward(torch.OutOfMemoryError("planted")),
        torch.OutOfMemoryError,
        "planted",
        4,
    ),
    "memory of a GPU in an evaluation": (
        evaluation(torch.OutOfMemoryError("planted")),
        torch.OutOfMemoryError,
        "planted",
        3,
    ),
    "exit": (forward(SystemExit(7)), SystemExit, "7", 4),
    "data": (of_rows, InvalidInput, "line 7", 2),
    "log": (of_log, atomic_files.NotWritten, "log.jsonl: No space left", 4),
}


@pytest.mark.few_cases("SIGTERM", "memory", "memory of a GPU in an evaluation", "data", "report")
@pytest.mark.parametrize("end", [*ENDS, "report"])
def test_the_last_complete_step_is_saved_and_goes_on_exactly(reference, tmp_path, monkeypatch, end):
    def report(progress: Any) -> None:
        if end == "report" and progress.step == 4:
            raise ZeroDivisionError("planted")

    plant, kind, text, step = ENDS.get(end, (None, ZeroDivisionError, "planted", 4))
    trainer = trainer_of(0, 1, **RECIPE)
    with monkeypatch.context() as patch:
        if plant is not None:
            plant(patch, trainer)
        with pytest.raises(kind, match=text):
            train(trainer, tmp_path, report)
    assert open_folder(tmp_path).training.step == trainer.saved_step == step
    # A step that was logged before its process was killed.
    with open(tmp_path / log.FILE, "a") as file:
        file.write(f'{{"step": {step + 1}, "loss": 1.0}}\n')
    torch.manual_seed(99)
    random = {}
    resumed = trainer_of(0, 1, resume=tmp_path, **RECIPE)
    train(resumed, tmp_path, lambda p: random.update({p.step: torch.get_rng_state()}))
    expected = [entry for entry in losses(reference.records) if end != "log" or entry[0] != 4]
    assert str(losses(log.read_log(tmp_path / log.FILE)[1])) == str(expected)
    assert are_equal(tensors_of(tmp_path), tensors_of(reference.folder))
    assert open_folder(tmp_path).training == open_folder(reference.folder).training
    assert [*random] == [*range(step + 1, STEPS + 1)]
    assert are_equal(random, {n: reference.random[n] for n in random})


def unreadable(error: Exception) -> Plant:
    """Raise in step 5, and then whenever a tensor is read."""

    def plant(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        def lost(*_: Any, **__: Any) -> Any:
            raise type(error)("of a read", 1)

        def lose() -> None:
            for module, name in ((saving, "unshard"), (StepResult, "read")):
                patch.setattr(module, name, lost)
            raise error

        forward = on_call(10, None, trainer.replica.forward, act=lose)
        patch.setattr(trainer.replica, "forward", forward)

    return plant


def of_optimizer(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Raise when half of the parameters of step 5 are updated."""
    step = trainer.optimizer.step

    def half() -> None:
        for group in trainer.optimizer.param_groups[:1]:
            for parameter in group["params"]:
                parameter.data.add_(1.0)
        raise MemoryError("planted")

    patch.setattr(trainer.optimizer, "step", on_call(5, None, step, act=half))


def not_finite(index: int) -> Plant:
    def plant(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        step = trainer.step

        def broken(stopping: bool) -> StepResult:
            result = step(stopping)
            if result.step == 5:
                result.values[index] = math.nan
            return result

        patch.setattr(trainer, "step", broken)

    return plant


def unwritable(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def full(*_: Any) -> None:
        raise atomic_files.NotWritten(errno.ENOSPC, "No space left on device", "run")

    write = saving._write_index
    patch.setattr(
        saving, "_write_index", lambda *given: full() if trainer.saved_step else write(*given)
    )


UNSAVED: dict[str, tuple[Plant, type[BaseException], str]] = {
    "lost device": (
        unreadable(torch.AcceleratorError("device lost", 1)),
        torch.AcceleratorError,
        "device lost",
    ),
    "full memory": (unreadable(MemoryError("planted")), MemoryError, "planted"),
    "optimizer": (of_optimizer, MemoryError, "planted"),
    "loss": (not_finite(0), NotFinite, r"step 5: .* norm is \S+\. Try a lower"),
    "gradient": (not_finite(2), NotFinite, "step 5: the loss is .* gradient norm is nan"),
    "full disk": (unwritable, NotSaved, "No space left on device; free some space"),
}


@pytest.mark.few_cases("lost device", "optimizer", "loss", "full disk")
@pytest.mark.parametrize("end", UNSAVED)
def test_a_state_that_is_not_whole_is_not_saved(tmp_path, monkeypatch, end):
    plant, kind, text = UNSAVED[end]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (out := tmp_path / "run").mkdir()
    trainer = trainer_of(0, 1, **{**RECIPE, "save_every": 3})
    with monkeypatch.context() as patch:
        plant(patch, trainer)
        with pytest.raises(kind, match=text):
            train(trainer, out)
    assert trainer.saved_step == open_folder(out).training.step == 3
    assert trainer.rescued is None
    assert trainer_of(0, 1, resume=out).step_number == 3


def test_an_error_before_the_first_step_saves_nothing(tmp_path, monkeypatch):
    trainer = trainer_of(0, 1, **RECIPE)
    monkeypatch.setattr(trainer, "held_out_loss", on_call(1, MemoryError(), lambda: 0.0))
    with pytest.raises(MemoryError):
        train(trainer, tmp_path)
    assert (trainer.saved_step, (tmp_path / INDEX).exists()) == (None, False)


def test_a_second_signal_ends_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "_SAME_S", 0.0)
    before, trainer = signal.getsignal(signal.SIGINT), trainer_of(0, 1, **RECIPE)

    def twice(progress: Any) -> None:
        for _ in range(2):
            # os.kill could merge the two signals into one
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(trainer, tmp_path, twice)
    assert not (tmp_path / INDEX).exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_sighup_that_nohup_ignores_ends_nothing(reference, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = trainer_of(0, 1, **RECIPE)
        train(trainer, tmp_path, lambda _: signal.raise_signal(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert are_equal(tensors_of(tmp_path), tensors_of(reference.folder))


@pytest.fixture
def run(reference: Reference, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a copy of the uninterrupted run."""
    shutil.copytree(reference.folder, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\xfe", b'{"kind": "nsa-train-log"\n'])
def test_a_damaged_log_is_set_aside(run, content):
    (run / log.FILE).write_bytes(content)
    with pytest.warns(UserWarning, match="log.jsonl could not be read. It is kept as log.jsonl.da"):
        train(trainer_of(0, 1, resume=run, **{**RECIPE, "steps": 7}), run)
    (aside,) = run.glob("log.jsonl.damaged-*")
    assert aside.read_bytes() == content
    assert [r["step"] for r in log.read_log(run / log.FILE)[1]] == [7]


def test_a_run_saved_before_its_first_step_keeps_its_log(tmp_path):
    recipe = {**RECIPE, "steps": 1}
    trainer_of(0, 1, **recipe).save(tmp_path)
    (tmp_path / log.FILE).write_text("half")
    with pytest.warns(UserWarning, match="could not be read. It is kept as log.jsonl.damaged-"):
        train(trainer_of(0, 1, resume=tmp_path, **recipe), tmp_path)
    (aside,) = tmp_path.glob("log.jsonl.damaged-*")
    assert aside.read_text() == "half"
    trainer_of(0, 1, **recipe).save(tmp_path)
    header = '{"kind": "nsa-train-log", "note": "first", '
    log_text = (tmp_path / log.FILE).read_text().replace('{"kind": "nsa-train-log", ', header)
    (tmp_path / log.FILE).write_text(log_text)
    train(trainer_of(0, 1, resume=tmp_path, **recipe), tmp_path)
    facts, records = log.read_log(tmp_path / log.FILE)
    assert (facts["note"], [record["step"] for record in records]) == ("first", [0, 1])
    train(trainer_of(0, 1, **recipe), tmp_path)
    assert "note" not in log.read_log(tmp_path / log.FILE)[0]


def test_the_log_of_another_run_is_refused(run, tmp_path):
    (other := tmp_path / "other").mkdir()
    trainer_of(0, 1, data="task").save(other)
    shutil.copyfile(run / log.FILE, other / log.FILE)
    trainer = trainer_of(0, 1, resume=run)
    header = (run / log.FILE).read_text().replace('"length": 33', '"length": 34')
    (run / log.FILE).write_text(header)
    with pytest.raises(
        InvalidInput, match="belongs to another run than the model beside it: its data"
    ):
        train(trainer, run)
    assert (run / log.FILE).read_text() == header


SMALL = ["--device", "cpu", "--length", "32", "--batch", "2", "--held-out-rows", "1"]
SMALL += ["--eval-every", "2", "--threads", "1"]


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (signal.SIGINT, 130, "ended by Ctrl-C"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
        (MemoryError(), 1, "MemoryError"),
        (ZeroDivisionError("planted"), 1, "ZeroDivisionError: planted"),
    ],
)
def test_the_command_names_the_end_and_the_step_and_how_to_go_on(
    nsa, text, tmp_path, monkeypatch, end, code, message
):
    out = tmp_path / "my run"
    with monkeypatch.context() as patch:
        if isinstance(end, signal.Signals):
            received(end)(patch, None)
        else:
            work = on_call(5, end, Trainer._forward_backward)
            patch.setattr(Trainer, "_forward_backward", work)
        done = nsa("train", "--out", str(out), "--data", text, "--steps", "5", *SMALL)
    command = f"nsa train --out '{out}' --device cpu --threads 1 --resume"
    assert done.code == code, done.err
    lines = done.err.splitlines()
    assert lines[-3:] == [f"nsa: {message}; step 4 of 5 is saved in {out}", "To go on:", command]
    is_unexpected = isinstance(end, ZeroDivisionError)
    assert ("Traceback" in done.err, len(lines) == 3) == (is_unexpected, not is_unexpected)
    assert nsa(*shlex.split(command)[1:]).code == 0
    assert open_folder(out).training.step == 5
    assert [r["step"] for r in log.read_log(out / log.FILE)[1]] == [0, 1, 2, 3, 4, 5]
