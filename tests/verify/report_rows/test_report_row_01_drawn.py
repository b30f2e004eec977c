"""Report row 1 with blocks drawn by hypothesis, which GPU machines may not have installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core.layout import BlockGeometry
from observed import keys_read, slot_kernel

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.data())
def test_report_row_01_any_blocks(data: Any) -> None:
    """For any integers in any order, `sel` reads the keys <= t of the distinct blocks."""
    size, tokens = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 24))
    width = data.draw(st.integers(0, 6))
    entry = st.one_of(st.integers(-2, tokens // size + 2), st.sampled_from([-(2**31), 2**31 - 1]))
    rows = data.draw(
        st.lists(st.lists(entry, min_size=width, max_size=width), min_size=tokens, max_size=tokens)
    )
    geometry = BlockGeometry(size, size, size, 4, 0, 1, 8)
    blocks = torch.tensor(rows, dtype=torch.int32).reshape(1, tokens, 1, width)
    read = keys_read(slot_kernel("sdpa", "sel", geometry), (1, tokens, 1, 1), tokens, blocks)[0]
    for t, row in enumerate(rows):
        distinct = {j for j in row if 0 <= j * size <= t}
        assert read[t][0] == sorted(
            i for j in distinct for i in range(j * size, min(j * size + size, t + 1))
        )
