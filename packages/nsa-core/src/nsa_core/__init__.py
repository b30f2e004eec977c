"""Native Sparse Attention (arXiv 2502.11089): layer, functional API and backend contract.

``import nsa_core`` does not import torch. Each name below is imported on first use.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "NSAError": "errors",
    "InvalidInput": "errors",
    "Unsupported": "errors",
    "BackendUnavailable": "errors",
    "NSAConfig": "config",
    "BlockGeometry": "layout",
    "API_VERSION": "contract",
    "BackendSpec": "contract",
    "Reason": "contract",
    "Request": "contract",
    "SlotSpec": "contract",
    "Unavailable": "contract",
    "hookimpl": "contract",
    "Plan": "plan.plan",
    "resolve": "plan.plan",
    "nsa_attention": "layer.attention",
    "nsa_attention_with_lse": "layer.attention",
    "block_attention": "block.attention",
    "block_attention_with_lse": "block.attention",
    "block_attention_decode": "block.decode",
    "block_attention_decode_with_lse": "block.decode",
    "plan_block_attention": "block.attention",
    "NSAttention": "layer.module",
    "NSACache": "cache",
    "pad": "packing",
    "unpad": "packing",
}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("nsa-core")
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
