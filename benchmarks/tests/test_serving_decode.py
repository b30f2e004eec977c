"""The check of serving_decode.py: ragged steps over blocks as vLLM has them, against the oracle."""

from __future__ import annotations

import pytest
import serving_decode
import torch
from serving_decode import SMALL

from nsa_core import InvalidInput, Unsupported


@pytest.mark.parametrize("layout", serving_decode.LAYOUTS)
def test_steps_over_the_blocks_of_vllm_equal_the_oracle(layout: str) -> None:
    assert serving_decode.check("cpu", torch.float32, layout) < 1


def test_the_check_sees_blocks_that_lack_compressed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed token i as state i: the last one of a block depends on the next block."""

    def table(blocks: torch.Tensor, geometry: object, states: int, pitch: int, n: int) -> object:
        state = torch.arange(SMALL.geometry.num_compressed(n))
        return (blocks[:, state // states] * pitch + state % states).int()

    monkeypatch.setattr(serving_decode, "state_table", table)
    with pytest.raises(InvalidInput, match=r"pages\.cmp"):  # the sharer would write it
        serving_decode.check("cpu", torch.float32)


def test_blocks_between_which_states_do_not_fit_are_refused() -> None:
    blocks = torch.zeros(10).as_strided((2, 2, 1, 1), (5, 2, 1, 1))
    with pytest.raises(Unsupported, match="a multiple of that of two states, got 5 and 2 elements"):
        serving_decode.state_pages(blocks)
