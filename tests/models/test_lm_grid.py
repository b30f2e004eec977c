"""A grid of data, context and tensor parallel processes trains like one process."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import pytest
import torch

import training_cases
from nsa_cli.train import _model
from nsa_core import InvalidInput
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from rank_processes import run_on_ranks

pytest.importorskip("safetensors")
CONTEXT, TENSOR = {"context_parallel": 2}, {"tensor_parallel": 2}
# name -> (options of the training, its fields that do not change the result)
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens in mode heads": ({}, CONTEXT),
    "tokens in mode sequence": ({"groups": 3}, {**CONTEXT, "parallel": "fsdp"}),
    "heads": ({}, TENSOR),
}
GRIDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{name} with {kind}": ({"groups": groups}, {**divided, "parallel": kind})
    for name, groups, divided in (
        ("data and heads mode", 2, CONTEXT),
        ("data and sequence mode", 3, CONTEXT),
        ("data and tensor", 2, TENSOR),
    )
    for kind in ("ddp", "fsdp")
}
GRIDS |= {
    "four ranks of one row": ({}, {"context_parallel": 4, "parallel": "fsdp"}),
    "tokens of rows without documents": ({"data": "task"}, {**CONTEXT, "recompute": True}),
    "heads of rows without documents": ({"data": "task"}, {**TENSOR, "recompute": True}),
}


class Run(NamedTuple):
    """The results of all ranks, by training.

    Attributes:
        losses: The results of two steps.
        same: Whether a run of one process has the same bits after a save.
        resumed: The results of the third step, after two on one process.
        shares: The shares of the parameters that a rank holds, and of the run that it writes.
        folder: The folder of the runs NAME-1, NAME-copy and NAME-2 of these.
    """

    losses: dict[str, list[Any]]
    same: dict[str, list[Any]]
    resumed: dict[str, list[Any]]
    shares: dict[str, list[Any]]
    folder: pathlib.Path


def run_all(world: int, trainings: dict[str, tuple[Any, Any]], folder: pathlib.Path) -> Run:
    """Run trainings on ``world`` processes, and resume each from a run of one process."""
    trained: list[tuple[str, dict[str, Any]]] = []
    copied: list[tuple[str, dict[str, Any]]] = []
    resumed: list[tuple[str, dict[str, Any]]] = []
    shared: list[tuple[str, dict[str, Any]]] = []
    for name, (options, divided) in trainings.items():
        one = str(folder / f"{name}-1")
        training_cases.losses(0, 1, save=one, **options)
        trained.append(("losses", {**options, **divided}))
        arguments = {"folder": one, "copy": str(folder / f"{name}-copy")}
        copied.append(("same_after_a_save", {**options, **divided, **arguments}))
        arguments = {"resume": one, "save": str(folder / f"{name}-2"), "steps": 1}
        resumed.append(("losses", {**options, **divided, **arguments}))
        shared.append(("shares", {**options, **divided, "folder": str(folder / f"{name}-copy")}))
    cases = [*trained, *copied, *resumed, *shared]
    outcomes = run_on_ranks(world, cases, ["training_cases"])
    count, names = len(trainings), list(trainings)
    parts = [dict(zip(names, outcomes[at : at + count])) for at in range(0, 4 * count, count)]
    return Run(*parts, folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the results of all trainings on two processes."""
    return run_all(2, TRAININGS, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the results of all trainings on four processes."""
    return run_all(4, GRIDS, tmp_path_factory.mktemp("four"))


def check_losses(run: Run, name: str, options: dict[str, Any]) -> None:
    """Check that losses, norms and the held-out loss on every rank are those of one process."""
    expected = training_cases.losses(0, 1, **options)
    for result in run.losses[name]:
        assert not isinstance(result, str), result
        for actual, of_one in zip(result, expected, strict=True):
            assert actual == pytest.approx(of_one, rel=1e-5)


def check_resumed(run: Run, name: str, options: dict[str, Any]) -> None:
    """Check that one process, several, and one again train like one process."""
    expected = training_cases.losses(0, 1, steps=4, **options)
    assert all(same is True for same in run.same[name]), run.same[name]
    third = run.resumed[name][0]
    assert not isinstance(third, str), third
    last = training_cases.losses(0, 1, steps=1, resume=str(run.folder / f"{name}-2"), **options)
    assert third[0] == pytest.approx(expected[2], rel=1e-5)
    assert last == [pytest.approx(of_one, rel=1e-5) for of_one in expected[3:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_have_the_losses_of_one(two, name):
    check_losses(two, name, TRAININGS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_run_goes_on_with_another_number_of_processes(two, name):
    check_resumed(two, name, TRAININGS[name][0])
    assert len(list((two.folder / f"{name}-2").glob("model-*"))) == 2  # written together


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_four_processes_have_the_losses_of_one(four, name):
    check_losses(four, name, GRIDS[name][0])
    check_resumed(four, name, GRIDS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "name"), [*((2, n) for n in TRAININGS), *((4, n) for n in GRIDS)]
)
def test_no_process_writes_more_than_its_share_and_fsdp_holds_its_share(request, count, name):
    run = request.getfixturevalue({2: "two", 4: "four"}[count])
    results = run.shares[name]
    assert not isinstance(results[0], str), results
    held, written = zip(*results)
    assert sum(written) == pytest.approx(1)
    assert max(written) < 1.5 / count
    divided = {**TRAININGS, **GRIDS}[name][1]
    copies = count // divided.get("tensor_parallel", 1) if divided.get("parallel") == "fsdp" else 1
    if copies > 1:  # rows of small tensors do not divide evenly
        assert max(held) < 1.6 / copies
    elif "tensor_parallel" in divided:
        assert max(held) < 0.95


@pytest.mark.slow
def test_a_divided_run_is_that_of_one_process(two):
    saved = open_folder(two.folder / "heads-2")
    assert saved.training.recipe.tensor_parallel == 2
    with saved._reader(saved.files) as read:
        layer, own = saved.config.layer, read("model.layers.0.self_attn.qkv.weight")
    heads = layer.n_heads * layer.qk_dim + 3 * layer.n_kv_heads * (layer.qk_dim + layer.v_dim)
    assert list(own.shape) == [heads, layer.dim]


@pytest.mark.slow
def test_each_process_gets_its_own_random_state_back(tmp_path):
    case = ("restored_random_state", {"folder": str(tmp_path)})
    assert run_on_ranks(2, [case], ["training_cases"]) == [[True, True]]
    # Another number of processes gets that of the first one.
    training_cases.trainer_of(0, 1, resume=tmp_path)
    expected = torch.get_rng_state()
    assert torch.equal(torch.manual_seed(100).get_state(), expected)


def test_a_sharded_run_goes_on_with_a_model_without_memory(tmp_path):
    training_cases.losses(0, 1, steps=1, save=str(tmp_path))
    folder, values = open_folder(tmp_path), {"backends": "auto"}
    for size, kind, expected in ((2, "fsdp", True), (2, "ddp", False), (1, "fsdp", False)):
        model = _model(values, 256, folder, World(torch.device("cpu"), 0, size), kind)
        assert {p.is_meta for p in model.parameters()} == {expected}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--context-parallel 2",
            "--context-parallel must divide the number of processes, got 2 for 1: start a multiple"
            " of 2 processes with torchrun --nproc-per-node, or set it to 1",
        ),
        (
            "--tensor-parallel 2",
            "--tensor-parallel must divide the number of processes, got 2 for 1: start",
        ),
        (
            "--context-parallel 2 --tensor-parallel 2",
            "--context-parallel must be 1 with --tensor-parallel 2, got 2: an attention layer"
            " divides its tokens or its heads",
        ),
        (
            "--tensor-parallel 3",
            "--tensor-parallel must divide the model's 2 key/value heads, got 3: choose 1 or 2",
        ),
        (
            "--attention dense --context-parallel 2",
            "--context-parallel must be 1 with attention 'dense', got 2: only NSA layers",
        ),
        (
            "--attention dense --tensor-parallel 4",
            "--tensor-parallel must be 1 with attention 'dense', got 4: only NSA layers",
        ),
        (
            "--length 5 --context-parallel 4",
            "--context-parallel must be at most 2 for rows of 5 tokens, got 4: each process has two"
            " pieces of a row",
        ),
    ],
)
def test_divisions_that_cannot_work_are_refused(nsa, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("nsa_cli.train._check_launched", lambda *_: None)  # as under torchrun
    out = tmp_path / "run"
    command = ["--out", str(out), "--device", "cpu", "--data", "uniform", *options.split()]
    done = nsa("train", *command)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not out.exists()


@pytest.mark.slow
def test_a_process_waits_in_a_group_of_the_grid_until_the_timeout_of_the_library():
    case = ("alone_in_a_group", {"timeout_s": 4})
    ((first, _),) = run_on_ranks(2, [case], ["training_cases"])
    assert not isinstance(first, str), first
    assert len(first) == 2
    for seconds, message in first:
        assert 3 < seconds < 20
        assert "imed out" in message


def test_rows_that_do_not_divide_over_groups_of_processes_are_refused():
    with pytest.raises(InvalidInput, match="batch 2 does not divide over accumulate 1 x 3 groups"):
        Recipe(batch=2, context_parallel=2).rows_of(0, 0, 3)
