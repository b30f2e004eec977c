"""Mode heads copies what it exchanges once, and computes the angles of its own rows only."""

from __future__ import annotations

import pytest

from rank_processes import run_on_ranks


@pytest.mark.slow
def test_heads_mode_copies_what_it_exchanges_once() -> None:
    for ranks in run_on_ranks(2, [("copied", {"layout": x}) for x in ("contiguous", "head_tail")]):
        for counts in ranks:
            assert not isinstance(counts, str), counts
            assert counts["copied"] == counts["sent"] > 0, counts
            assert counts["joined"] <= 1, counts  # the positions of the pieces
            assert 0 < counts["angles"] < counts["rows"], counts
