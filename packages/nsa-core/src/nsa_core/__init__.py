"""Native Sparse Attention (arXiv 2502.11089): the layer, the functional entry, and the contract
with backends.

Importing this package imports no torch; the names below load on first use.
"""

from importlib import import_module
from typing import Any

_HOME = {
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
    "Plan": "dispatch.plan",
    "resolve": "dispatch.plan",
    "nsa_attention": "layer.attention",
    "NSAttention": "layer.module",
    "NSACache": "cache",
    "pad": "packing",
    "unpad": "packing",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("nsa-core")
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
