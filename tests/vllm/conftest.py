"""Tests of nsa-vllm, where vLLM is installed: `nox -s vllm`."""

from __future__ import annotations

import importlib.util
import os

# This folder itself is a namespace package `vllm` to Python.
_spec = importlib.util.find_spec("vllm")
collect_ignore_glob = [] if _spec is not None and _spec.origin else ["test_*.py"]

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a core may have other work
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")  # compiled models are traced, without a C++ compiler
