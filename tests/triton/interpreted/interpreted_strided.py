"""Integer metadata of any strides on the triton backend."""

from __future__ import annotations

import strided_suite as suite


class TestTriton(suite.StridedMetadata):
    backend = "triton"
    decode_forms = frozenset({"append", "gates", "compress", "step"})
