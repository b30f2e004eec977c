"""Several processes under torchrun train like one process, and resume a run."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from nsa_core.errors import InvalidInput
from nsa_models.lm import log
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import join

pytestmark = pytest.mark.slow  # starts several training processes
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def train_records(folder, steps, *options, launched=2):
    """Run `nsa train` on so many processes of torchrun, or without torchrun if it is 0.

    Returns:
        The records of its log.
    """
    command = [
        sys.executable,
        *([*TORCHRUN, str(launched)] if launched else []),
        "-m",
        "nsa_cli",
        "train",
        "--out",
        str(folder),
    ]
    command += ["--device", "cpu", "--steps", str(steps), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return log.read_log(folder / log.FILE)[1]


@pytest.fixture
def data(tmp_path) -> list[str]:
    """Return the options of small training on forty text files.

    The learning rate of its warm-up does not depend on the number of steps.
    """
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"document {number} " + "says a little " * number)
    options = f"--data {text} --length 32 --batch 4 --accumulate 2 --warmup 9 --eval-every 2"
    return [*options.split(), "--held-out", "0.2", "--held-out-rows", "2"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_two_and_one_processes_have_the_losses_of_one(tmp_path, data, kind):
    alone = train_records(tmp_path / "alone", 6, *data, launched=0)
    out = tmp_path / "shared"
    train_records(out, 2, *data, "--parallel", kind, launched=1)
    assert len(list(out.rglob("*.safetensors"))) == 2  # weights and moments
    train_records(out, 4, "--resume")
    whole = sum(p.nbytes for p in open_folder(out).model().parameters())
    for pattern, size in (("model-*", whole), ("optimizer/*", 2 * whole)):
        shards = list(out.glob(f"{pattern}safetensors"))
        assert len(shards) == 2
        assert all(0.4 * size < path.stat().st_size < 0.6 * size for path in shards)
    shared = train_records(out, 6, "--resume", launched=0)
    assert [r["step"] for r in shared] == [r["step"] for r in alone] == [0, 1, 2, 3, 4, 5, 6]
    for one, two in zip(alone, shared):
        for name in ("loss", "held_out_loss", "grad_norm"):
            assert two.get(name) == pytest.approx(one.get(name), abs=2e-4), (name, one, two)
    assert len(list(out.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("name", ["context-parallel", "tensor-parallel"])
def test_processes_that_share_rows_have_the_losses_of_one(tmp_path, data, name):
    alone = train_records(tmp_path / "alone", 4, *data, launched=0)
    out = tmp_path / "shared"
    train_records(out, 2, *data, f"--{name}", "2")
    command = [sys.executable, "-m", "nsa_cli", "train", "--out", str(out), "--resume"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert f"--{name} must divide the number of processes, got 2 for 1" in done.stderr
    train_records(out, 3, "--resume", f"--{name}", "1", launched=0)
    shared = train_records(out, 4, "--resume", f"--{name}", "2")
    assert [r["step"] for r in shared] == [r["step"] for r in alone] == [0, 1, 2, 3, 4]
    # Before the first update, only the order of sums differs. Adam divides gradients by their size:
    # in a few elements whose gradients cancel to their rounding, it then makes another update.
    for one, two in zip(alone, shared):
        for field in {"loss", "held_out_loss", "grad_norm"} & one.keys():
            limit = 1e-6 if one["step"] <= 1 else 1e-4
            assert two[field] == pytest.approx(one[field], rel=limit, nan_ok=True), one["step"]
    command = [sys.executable, "-m", "nsa_cli", "generate", "--checkpoint", str(out)]
    done = subprocess.run(
        [*command, "--max-new-tokens", "2", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


RAISES = "raise ZeroDivisionError('planted')"
KILL, SIGNAL = "os.kill(os.getpid(), signal.SIGKILL)", "signal.raise_signal(signal.{})"
HEARD = "was killed or is stuck: nothing heard"
# end -> (the statement, its ranks, its step, the message, the last saved step); others are saved
# every second step.
ENDS = {
    "a kill": (KILL, "1", 3, f"process 1 of 2 {HEARD}", 2),
    "a kill of the first": (KILL, "0", 3, f"process 0 of 2 {HEARD}", 2),
    # The others wait in a collective.
    "an error": (RAISES, "1", 3, "process 1 of 2 ended: ZeroDivisionError: planted", 2),
    "an error of the first": (RAISES, "0", 3, "ZeroDivisionError: planted", 2),
    "a hang": ("time.sleep(600)", "1", 3, "RuntimeError: ", 2),
    "an error of both": (RAISES, "01", 4, "ZeroDivisionError: planted", 3),
    "a signal": (SIGNAL.format("SIGTERM"), "1", 4, "ended by SIGTERM", 5),
    "a signal of the first": (SIGNAL.format("SIGHUP"), "0", 4, "ended by SIGHUP", 5),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_named_and_the_run_goes_on_after_it(tmp_path, data, end):
    out, (statement, ranks, number, message, step) = tmp_path / "run", ENDS[end]
    timeout_s = 15 if end == "a hang" else 300
    (tmp_path / "ends.py").write_text(
        "import os, signal, sys, time\n"
        "from datetime import timedelta\n"
        "from nsa_cli.app import main\n"
        "from nsa_models.lm import parallel\n"
        "from nsa_models.lm.lanes import Lanes\n"
        "step, steps = Lanes.step, []\n"
        "def broken(self):\n"
        "    steps.append(0)\n"
        f"    if os.environ['RANK'] in '{ranks}' and len(steps) == {number}:\n"
        f"        open({str(tmp_path / 'planted')!r}, 'w').close()\n"
        f"        {statement}\n"
        "    return step(self)\n"
        f"Lanes.step, parallel.TIMEOUT = broken, timedelta(seconds={timeout_s})\n"
        "main(sys.argv[1:])\n"
    )
    options = ["--device", "cpu", *data, "--steps", "6", "--save-every", "2", "--out", str(out)]
    command = [sys.executable, *TORCHRUN, "2", str(tmp_path / "ends.py"), "train", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    # Without the time to start, which is long where other processes run.
    assert time.time() - (tmp_path / "planted").stat().st_mtime < 80
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    said = [line for line in lines if line.startswith("nsa: ")]
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"nsa: {message}")
    assert said[0].endswith(f"; step {step} of 6 is saved in {out}")
    again = lines[lines.index(said[0]) + 2]
    assert again.startswith("torchrun --nproc-per-node 2 -m nsa_cli train --out")
    assert again.endswith("--resume")
    training = open_folder(out).training
    assert (training.step, training.processes) == (step, 2)
    records = train_records(out, step + 1, "--resume", launched=0)
    assert [r["step"] for r in records] == [*range(step + 2)]


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "get_node_local_rank", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        InvalidInput, match="device 'cuda:2' does not exist: there are 2 CUDA devices"
    ):
        join("cuda")


# The last reference to a group joins its threads. If it is DDP's, this can end in a deadlock.
DELETES_A_MODEL = """
import gc
from pathlib import Path
import torch
from nsa_models.lm import parallel

def loops():
    return sum((task / "comm").read_text() == "pt_gloo_runloop\\n" for task in TASKS.iterdir())

TASKS = Path("/proc/self/task")
world = parallel.join("cpu")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
running = loops()
world.close()
del model
gc.collect()
assert loops() == running > 0, (loops(), running)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_a_deleted_model_does_not_destroy_the_group(tmp_path):
    script = tmp_path / "deletes.py"
    script.write_text(DELETES_A_MODEL)
    command = [sys.executable, *TORCHRUN, "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-such-option"], "No such option: --no-such-option"),
        (["--tensor-parallel", "3"], "--tensor-parallel must divide"),
    ],
)
def test_processes_print_an_error_once_and_have_the_same_exit_code(tmp_path, options, message):
    """One process is late. The first waits for it, here as long as a busy machine takes."""
    (tmp_path / "late.py").write_text(
        "import os, sys, time\n"
        "from datetime import timedelta\n"
        "from torch.distributed.rendezvous import rendezvous\n"
        "from nsa_cli import app, torchrun\n"
        "torchrun._TIMEOUT, torchrun._WAIT_S = timedelta(seconds=100), 100\n"
        "ending = torchrun.ending\n"
        "def late(message):\n"
        "    time.sleep(3 * int(os.environ['RANK']))\n"
        "    return ending(message)\n"
        "torchrun.ending = late\n"
        "app.main(sys.argv[1:])\n"
    )
    command = [*TORCHRUN, "2", str(tmp_path / "late.py"), "train", *options]
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path / "run"), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert [message in line for line in lines if line.startswith("nsa: ")] == [True], done.stderr
    codes = [line.split()[2] for line in lines if line.lstrip().startswith("exitcode")]
    assert codes == ["2", "2"], done.stderr
