"""NSA models in vLLM's engine: the greedy tokens are those of `generate`."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm import LLM, SamplingParams
from vllm.config import CompilationConfig, CompilationMode
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform
from vllm.transformers_utils.config import get_config

import nsa_vllm
from hf_models import NSA
from nsa_core.decode import run as decode_run
from nsa_core.errors import Unsupported
from nsa_vllm import options as vllm_options
from nsa_vllm.plugin import OPERATOR, version_problem
from served_models import Request, greedy, requests, saved_model

# A step of at most 48 rows divides prompts; blocks of 16 tokens end inside of shared prefixes.
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "block_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "prefix cache": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {"num_gpu_blocks_override": 46},
    "speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        }
    },
    "compiled": {"enforce_eager": False},
}
# Once per process: a second call fails where numba was imported, which speculation does.
_replace_kernels = functools.cache(CpuPlatform.register_triton_kernel_overrides)
CpuPlatform.register_triton_kernel_overrides = staticmethod(_replace_kernels)

COUNTERS = ("prefix_cache_hits", "num_preemptions", "spec_decode_num_accepted_tokens")


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    """An engine in this process."""
    settings = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 400}
    settings |= {"enforce_eager": True, "disable_log_stats": False, **options}
    try:
        yield LLM(model=str(folder), **settings)
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def counters(llm: LLM) -> dict[str, int]:
    """Return COUNTERS, and the drafted tokens; they count on from engine to engine."""
    names = (*COUNTERS, "spec_decode_num_draft_tokens")
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(values.get(f"vllm:{name}", 0)) for name in names}


def serve(llm: LLM, work: Sequence[Request]) -> list[list[int]]:
    """Return the greedy tokens of requests, of which two arrive in every other step."""
    waiting, done, step = list(enumerate(work)), dict[int, list[int]](), 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        for _ in range(2 if step % 2 == 0 else 0):
            if waiting:
                i, request = waiting.pop(0)
                llm.llm_engine.add_request(
                    str(i),
                    {"prompt_token_ids": request.prompt},
                    SamplingParams(max_tokens=request.new, temperature=0, ignore_eos=True),
                )
        for output in llm.llm_engine.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
        step += 1
    return [done[i] for i in range(len(work))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "qwen3"


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = saved_model(folder, "qwen3")
    tokens = [greedy(model, request) for request in requests()]
    assert len({*map(tuple, tokens)}) > 30
    return tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_requests_that_arrive_over_time(
    name: str, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []

    def attend_chunk(*arguments: Any) -> Any:
        chunks.append(arguments[2].shape[1])
        return attend(*arguments)

    attend = decode_run.attend_chunk
    monkeypatch.setattr(decode_run, "attend_chunk", attend_chunk)
    with engine(folder, **{**SMALL, **SETTINGS[name]}) as llm:
        before = counters(llm)
        tokens = serve(llm, requests())
        count = {key: value - before[key] for key, value in counters(llm).items()}
    wrong = {i: pair for i, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]}
    assert not wrong
    assert len(chunks) > 32  # of two layers
    assert 16 <= min(chunks) < max(chunks)
    assert (count["prefix_cache_hits"] > 500) == (name != "no prefix cache")
    assert (count["num_preemptions"] > 0) == (name == "preemption")
    accepted, drafted = (count[f"spec_decode_num_{x}_tokens"] for x in ("accepted", "draft"))
    assert (0 < accepted < drafted) == (name == "speculation")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"nsa": {**NSA, "shared_kv": True}}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ],
)
def test_one_request_of_each_model(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    request = requests()[0]._replace(new=24)
    expected = greedy(saved_model(tmp_path, kind, **changes), request)
    with engine(tmp_path) as llm:
        assert serve(llm, [request]) == [expected]


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype must be 'auto', got 'fp8'"),
        (
            {"quantization": "fp8", "dtype": "bfloat16"},
            {},
            "quantization must not be set, got 'fp8'",
        ),
        ({}, {"nsa_layers": [1]}, r"nsa_layers is \[1\], but all 2 layers must have NSA"),
        ({"enable_lora": True}, {}, "enable_lora must not be set"),
        ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size must be 1, got 2"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size must be 1, got 2"),
    ],
)
def test_options_that_do_not_work_are_refused(
    options: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved_model(tmp_path, "llama", **changes)
    with pytest.raises((Unsupported, ValueError), match=message), engine(tmp_path, **options):
        pass


def test_sleep_mode_is_refused() -> None:
    """vLLM for the CPU refuses it before NSA can."""
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        enable_dbo=False,
    )
    model = SimpleNamespace(
        hf_config=SimpleNamespace(nsa_layers=None, nsa=None),
        enable_sleep_mode=True,
        quantization=None,
    )
    config: Any = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
    )
    assert [*vllm_options._problems(config)] == [
        "enable_sleep_mode must not be set: end the server, and start it again"
    ]


def test_other_versions_of_vllm_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved_model(tmp_path, "llama")
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    nsa_vllm.register()
    try:
        with pytest.raises(Unsupported, match=r">= 0.32 and < 0.33, but 0.33.1 is installed"):
            get_config(tmp_path, trust_remote_code=False)
    finally:
        monkeypatch.undo()
        nsa_vllm.register()
    assert get_config(tmp_path, trust_remote_code=False).nsa
    assert not version_problem("0.32.0+cpu")
    assert version_problem("0.320.0")


def test_cuda_graphs_of_parts_end_at_attention() -> None:
    """Captured attention would replay the metadata of another step."""
    nsa_vllm.register()
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE)
    config.set_splitting_ops_for_v1(all2all_backend="")
    assert config.splitting_ops is not None
    assert config.splitting_ops.count(OPERATOR) == 1


def test_compressed_tokens_lie_beside_the_keys_of_sel(folder: Path, expected: Any) -> None:
    """vLLM keeps three groups: sel and cmp share a table; win and raw are sliding windows."""
    with engine(folder, **SMALL) as llm:
        core = llm.llm_engine.engine_core.engine_core
        groups = core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        names = [{name.rpartition(".")[2] for name in group.layer_names} for group in groups]
        assert sorted(map(sorted, names)) == [["cmp", "sel"], ["raw"], ["win"]]
        assert {group.kv_cache_spec.block_size for group in groups} == {16}
