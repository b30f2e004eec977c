"""The examples train to their end, each where its stack is installed: `nox -s examples`."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
ONE = (sys.executable,)
TWO = (*ONE, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SPEED = re.compile(r"^[1-9][\d,]* tokens/s in steps of [1-9][\d,]+ tokens$", re.MULTILINE)
SECONDS = 900  # of one example, on a machine that does other work too

pytestmark = pytest.mark.slow


def skip_without(module: str) -> None:
    """Skip a test in an environment that lacks its stack."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; nox -s examples installs it")


def run(tmp_path, name: str, *options: str, launcher: tuple[str, ...] = ONE) -> str:
    """Run an example whose stack is installed, and return what it printed."""
    stack = name.split("_")[0]
    skip_without("accelerate" if stack == "trainer" else stack)
    command = [*launcher, str(EXAMPLES / f"{name}.py"), *options]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def losses(output: str) -> list[tuple[float, float]]:
    """Return the first and the last loss of each training that an example reports."""
    found = re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", output)
    return [(float(first), float(last)) for first, last in found]


@pytest.mark.parametrize(
    ("name", "options", "trainings"),
    [
        ("trl_sft", ("--length", "4096"), 1),
        ("trl_sft", ("--padding-free",), 1),
        ("trl_sft", ("--lora",), 1),
        ("trl_preferences", (), 2),
        ("lightning_train", (), 1),
    ],
    ids=str,
)
def test_the_loss_falls(tmp_path, name, options, trainings):
    output = run(tmp_path, name, *options)
    reported = losses(output)
    assert len(reported) == trainings
    assert name != "trl_sft" or SPEED.search(output)
    assert all(last < 0.98 * first for first, last in reported), reported


def test_trl_grpo_has_rewards_and_a_divergence_from_the_first_model(tmp_path):
    output = run(tmp_path, "trl_grpo")
    first, last, divergence = map(
        float, re.search(r"reward (\S+) -> (\S+), KL (\S+)", output).groups()
    )
    assert 0 < first < 1
    assert 0 < last < 1
    assert divergence > 0


def test_accelerate_shards_without_another_loss(tmp_path):
    output = run(tmp_path, "accelerate_train", launcher=TWO)
    assert SPEED.search(output)
    ((first, last),) = losses(output)
    assert last < 0.9 * first
    sharded = losses(run(tmp_path, "accelerate_train", "--fsdp", launcher=TWO))
    assert sharded == [pytest.approx((first, last), abs=2e-3)]


def test_context_parallelism_in_the_trainer_has_the_losses_of_one_process(tmp_path):
    name = "trainer_context_parallel"
    divided = losses(run(tmp_path, name, launcher=TWO))
    assert divided == losses(run(tmp_path, name, launcher=(*TWO[:-1], "1")))
    assert divided[0][1] < 0.9 * divided[0][0]


@pytest.mark.parametrize("options", [(), ("--compile",)], ids=str)
def test_torchtitan_trains_with_fsdp(tmp_path, options):
    output = run(tmp_path, "torchtitan_train", *options, launcher=TWO)
    steps = [float(loss) for loss in re.findall(r"loss: *(?:\x1b\S*)?(\d+\.\d+)", output)]
    assert steps[-1] < 0.95 * steps[0], output[-4000:]
    assert "GQAttention.Config -> TitanNSA.Config" in output


def test_torchtitan_weights_give_the_same_scores_after_the_rotary_permutation(monkeypatch):
    """Scores q.k of a dense layer, rotated, are those of the NSA layer with its weights."""
    skip_without("torchtitan")
    monkeypatch.syspath_prepend(EXAMPLES)
    import torch
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan_nsa import from_dense, nsa

    config = llama3_configs["debugmodel"]("varlen").layers[0].attention
    dense, sparse = config.build(), nsa(config).build()
    dense.init_states()
    missing, unexpected = sparse.load_state_dict(
        from_dense(dense.state_dict(), dense.head_dim), strict=False
    )
    assert {name.split(".")[0] for name in missing} == {"phi_k", "phi_v", "gate"}
    assert not unexpected
    x = torch.randn(1, 40, config.dim)
    q, k, v = dense.qkv_linear(x)
    q, k = dense.rope(q, k)
    projected = sparse.project(x)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
    for key, value in zip(projected.k[1:], projected.v[1:]):
        ours = torch.einsum("bqhd,bkhd->bhqk", projected.q, key)
        torch.testing.assert_close(ours, scores, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(value, v)


def test_transformers_serves_over_http(tmp_path, monkeypatch):
    skip_without("openai")  # of transformers[serving]
    monkeypatch.syspath_prepend(EXAMPLES)
    from tiny_model import tiny_model

    folder = tiny_model(str(tmp_path / "model"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command = [sys.executable, str(EXAMPLES / "transformers_serve.py"), folder, *options]
    question = {"model": folder, "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({**question, "max_tokens": 5}).encode(),
        {"Content-Type": "application/json"},
    )
    server = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        answer = json.load(_when_ready(request, server))
    finally:
        server.terminate()
        server.wait()
    assert answer["usage"]["completion_tokens"] == 5


def _when_ready(request: urllib.request.Request, server: subprocess.Popen):
    """Send a request as soon as the server listens."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < end, "the server does not listen"
            time.sleep(0.5)
