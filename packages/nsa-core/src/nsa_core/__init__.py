"""Native Sparse Attention (arXiv 2502.11089): layer, functional API and backend contract.

``import nsa_core`` does not import torch. Each name below is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names of _MODULE_OF, for type checkers and editors
    from nsa_core.block.attention import block_attention as block_attention
    from nsa_core.block.attention import block_attention_with_lse as block_attention_with_lse
    from nsa_core.block.attention import plan_block_attention as plan_block_attention
    from nsa_core.block.decode import block_attention_decode as block_attention_decode
    from nsa_core.block.decode import (
        block_attention_decode_with_lse as block_attention_decode_with_lse,
    )
    from nsa_core.cache import NSACache as NSACache
    from nsa_core.config import NSAConfig as NSAConfig
    from nsa_core.contract import API_VERSION as API_VERSION
    from nsa_core.contract import BackendSpec as BackendSpec
    from nsa_core.contract import Reason as Reason
    from nsa_core.contract import Request as Request
    from nsa_core.contract import SlotSpec as SlotSpec
    from nsa_core.contract import Unavailable as Unavailable
    from nsa_core.contract import hookimpl as hookimpl
    from nsa_core.decode.api import decode_rows as decode_rows
    from nsa_core.decode.api import nsa_decode as nsa_decode
    from nsa_core.decode.api import rope_angles as rope_angles
    from nsa_core.decode.pages import LayerPages as LayerPages
    from nsa_core.decode.pages import PagedKV as PagedKV
    from nsa_core.decode.pages import kv_scale as kv_scale
    from nsa_core.decode.run import DecodeRows as DecodeRows
    from nsa_core.errors import BackendUnavailable as BackendUnavailable
    from nsa_core.errors import InvalidInput as InvalidInput
    from nsa_core.errors import NSAError as NSAError
    from nsa_core.errors import Unsupported as Unsupported
    from nsa_core.flops import attention_flops as attention_flops
    from nsa_core.layer.attention import nsa_attention as nsa_attention
    from nsa_core.layer.attention import nsa_attention_with_lse as nsa_attention_with_lse
    from nsa_core.layer.module import NSAttention as NSAttention
    from nsa_core.layout import BlockGeometry as BlockGeometry
    from nsa_core.packing import pad as pad
    from nsa_core.packing import unpad as unpad
    from nsa_core.plan.plan import Plan as Plan
    from nsa_core.plan.plan import resolve as resolve

    __version__: str

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
    "attention_flops": "flops",
    "DecodeRows": "decode.run",
    "decode_rows": "decode.api",
    "nsa_decode": "decode.api",
    "rope_angles": "decode.api",
    "LayerPages": "decode.pages",
    "PagedKV": "decode.pages",
    "kv_scale": "decode.pages",
    "NSAttention": "layer.module",
    "NSACache": "cache",
    "pad": "packing",
    "unpad": "packing",
}

__all__ = sorted([*_MODULE_OF, "__version__"])


if not TYPE_CHECKING:  # or every misspelt name would have type Any

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("nsa-core")
        if name in _MODULE_OF:
            return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
