"""Training on a GPU: equal loss curves on all backends, no synchronisation in a step, no leak."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import statistics
import subprocess
import sys

import pytest
import torch

import leak_sentinel
from nsa_core import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.plan.registry import default_registry
from nsa_models.lm import log
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.data import batch_of
from nsa_models.lm.lanes import Lanes
from nsa_models.lm.model import IGNORED, LanguageModel
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.train import train
from nsa_models.lm.trainer import Trainer

pytestmark = pytest.mark.gpu
# Block and window sizes of the paper with few layers, because backends differ in attention only.
MODEL = LMConfig(NSAConfig(dim=256, n_heads=4, n_kv_heads=2), 2)
SPECS = {e.name: e.spec for e in default_registry().entries if e.status == "ready" and e.spec}
OFFERING = {slot: [name for name, spec in SPECS.items() if slot in spec.slots] for slot in SLOTS}
TRIPLES = [
    triple
    for triple in itertools.product(*(OFFERING[slot] for slot in ("cmp", "sel", "win")))
    if triple != ("sdpa",) * 3
]
STEPS = 100


def make_trainer(backends=None, task="python-docs", length=1024, **options) -> Trainer:
    torch.manual_seed(0)
    data = open_data(DataSpec(task, length, vocab_size=256, held_out_rows=4))
    recipe = Recipe(**{"steps": STEPS, "batch": 4, "learning_rate": 3e-4, "warmup": 20, **options})
    return Trainer(LanguageModel(MODEL, backends), data, recipe, World(torch.device("cuda")))


def losses(trainer: Trainer, steps: int = STEPS) -> torch.Tensor:
    return torch.tensor([trainer.step().read()[0] for _ in range(steps)])


@pytest.fixture(scope="module")
def sdpa_losses():
    """Return a function that returns the losses of the sdpa backend in a precision."""
    curves: dict[str, torch.Tensor] = {}

    def curve(precision: str) -> torch.Tensor:
        if precision not in curves:
            curves[precision] = losses(make_trainer("sdpa", precision=precision))
            # the model learns
            assert curves[precision][-10:].mean() < curves[precision][:10].mean() - 0.5
        return curves[precision]

    return curve


@pytest.mark.parametrize("triple", TRIPLES, ids="-".join)
def test_report_row_17_every_triple_of_backends_gives_the_loss_curve(triple, sdpa_losses):
    precision = "bfloat16" if "fa2" in triple else "float32"
    backends = dict(zip(("cmp", "sel", "win"), triple)) | {"select": "sdpa", "combine": "sdpa"}
    difference = (
        (losses(make_trainer(backends, precision=precision)) - sdpa_losses(precision))
        .abs()
        .max()
        .item()
    )
    print(
        f"row 17: {'-'.join(triple)} {precision}: at most {difference:.2e} apart over {STEPS} steps"
    )
    assert difference <= 1e-3


def test_packed_and_dense_rows_give_equal_losses():
    curves = []
    for packed in (False, True):
        trainer = make_trainer(task="uniform", precision="float32")
        trainer.data.rows.packed = packed
        curves.append(losses(trainer, 20))
    assert (curves[0] - curves[1]).abs().max() <= 1e-3


@pytest.mark.parametrize(
    "mode", ["compile", "graph", "recompute", "compile and graph", "graph in parts"]
)
def test_compile_graph_and_recompute_do_not_change_the_loss(mode):
    task = "uniform" if "graph" in mode else "python-docs"
    options = {"task": task, "precision": "bfloat16", "accumulate": 2 if "parts" in mode else 1}
    eager = losses(make_trainer(**options), 20)
    switches = mode.removesuffix(" in parts").split(" and ")
    changed = losses(make_trainer(**options, **dict.fromkeys(switches, True)), 20)
    # Fused products round once, separate ones twice.
    assert (changed - eager).abs().max() <= 5e-3


class SomeIgnored:
    """Rows of which every other one has only 8 targets."""

    def __init__(self, rows):
        self._rows, self._count = rows, 0

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def lane(self, number, count):
        return SomeIgnored(self._rows.lane(number, count))

    def __next__(self):
        row, self._count = next(self._rows), self._count + 1
        few_targets = [IGNORED] * (len(row.targets) - 8) + row.targets[-8:]
        return row._replace(targets=few_targets) if self._count % 2 else row


def test_a_graph_weights_each_batch_by_its_own_targets():
    gradient_norms = []
    for graph in (False, True):
        trainer = make_trainer(task="uniform", precision="bfloat16", batch=1, graph=graph)
        trainer.lanes = Lanes(SomeIgnored(trainer.data.rows), trainer.recipe, trainer.world)
        gradient_norms.append(torch.tensor([trainer.step().read()[2] for _ in range(6)]))
    torch.testing.assert_close(gradient_norms[1], gradient_norms[0], rtol=2e-2, atol=0)


def test_steps_do_not_synchronise():
    trainer = make_trainer(task="uniform", precision="bfloat16")
    losses(trainer, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [trainer.step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(number) for step in steps for number in step.read())


def test_batches_and_results_of_a_step_do_not_wait_for_later_work():
    # The tokens of a batch take more than 64 KiB, above which a pageable copy would wait.
    trainer = make_trainer(task="uniform", precision="bfloat16", batch=16)
    losses(trainer, 3)
    step = trainer.step()
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    assert math.isfinite(step.read()[0])
    batch_of([next(trainer.data.rows) for _ in range(16)], packed=False).to("cuda")
    assert not torch.cuda.current_stream().query()  # the sleep has not ended
    torch.cuda.synchronize()


def test_evaluated_and_saved_steps_have_the_speed_of_the_others(tmp_path):
    recipe = {"steps": 24, "eval_every": 4, "save_every": 6, "batch": 16}
    records = train(make_trainer(precision="bfloat16", length=4096, **recipe), tmp_path)[5:]
    usual = statistics.median(r.tokens_per_s for r in records)
    assert all(0.6 * usual < r.tokens_per_s < 1.5 * usual for r in records)
    assert all(0 < r.matrix_share < 1 for r in records)


def test_a_resumed_run_continues_the_loss_curve(tmp_path):
    pytest.importorskip("safetensors")
    options = {"precision": "bfloat16"}
    expected = losses(make_trainer(**options), 6)
    first = make_trainer(**options)
    before_save = losses(first, 3)
    first.save(tmp_path)
    saved = open_folder(tmp_path)
    data = open_data(DataSpec("python-docs", 1024, held_out_rows=4))
    model, here = LanguageModel(saved.config), World(torch.device("cuda"))
    second = Trainer(model, data, first.recipe, here, saved, resume=True)
    assert (torch.cat((before_save, losses(second, 3))) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("times", [1, 2, 4])
def test_nothing_leaks_at_full_size(times):
    model = dataclasses.replace(size("m7c_125m"), n_layers=2, vocab_size=64)
    recipe = Recipe(
        steps=500, batch=4, learning_rate=1e-3, warmup=50, weight_decay=0.0, precision="bfloat16"
    )
    excess = leak_sentinel.excess(model, times * model.layer.window_size, recipe, device="cuda")
    print(f"loss at {times} w beyond ln V: {excess:.4f}")
    assert abs(excess) <= leak_sentinel.LIMIT


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_gpus_give_the_loss_of_one(tmp_path: pathlib.Path, kind: str) -> None:
    pytest.importorskip("safetensors")
    options = [
        "train",
        "--device",
        "cuda",
        "--length",
        "512",
        "--batch",
        "8",
        "--steps",
        "20",
        "--warmup",
        "5",
    ]
    curves = []
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for name, launcher, division in (
        ("one", [], []),
        ("two", torchrun, ["--parallel", kind]),
    ):
        out = tmp_path / name
        command = [
            sys.executable,
            *launcher,
            "-m",
            "nsa_cli",
            *options,
            "--out",
            str(out),
            *division,
        ]
        subprocess.run(command, check=True)
        records = log.read_log(out / log.FILE)[1][1:]
        curves.append(torch.tensor([record["loss"] for record in records]))
    print(f"{kind}: at most {(curves[0] - curves[1]).abs().max():.2e} apart")
    assert (curves[0] - curves[1]).abs().max() <= 1e-3
