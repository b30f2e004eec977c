"""Report row 6, 'varlen crashes in training': packed and dense losses agree to 1e-3 in 20 steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nsa_bench.python_docs import library_text
from nsa_core import NSAttention
from nsa_verify.problems.cases import config_of

CONFIG = config_of(4, 2, 8, 8, (8, 4, 16, 4, 16))
BATCH, LENGTH, STEPS = 4, 96, 20
BYTES = STEPS * BATCH * (LENGTH + 1)


class Model(torch.nn.Module):
    """A byte-level language model with one NSA layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn = torch.nn.Embedding(256, CONFIG.dim), NSAttention(CONFIG)
        self.head = torch.nn.Linear(CONFIG.dim, 256)

    def forward(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of the next byte for tokens [B, S], or packed [T] with cu_seqlens."""
        x = self.embed(tokens)
        return self.head(x + self.attn(F.rms_norm(x, (CONFIG.dim,)), cu_seqlens))


def losses(packed: bool, fault: int = 0) -> list[float]:
    """Return the loss of each step; ``fault`` shifts the inner document bounds, in tokens."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    text = torch.frombuffer(bytearray(library_text(BYTES)[:BYTES]), dtype=torch.uint8)
    cu = torch.arange(BATCH + 1, dtype=torch.int32) * LENGTH
    cu[1:-1] += fault
    values = []
    for batch in text.long().view(STEPS, BATCH, LENGTH + 1):
        tokens, targets = batch[:, :-1], batch[:, 1:].flatten()
        logits = model(tokens.flatten(), cu) if packed else model(tokens, None).flatten(0, 1)
        loss = F.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def test_report_row_06_varlen_trains_as_dense(figure: Any) -> None:
    dense, varlen = losses(packed=False), losses(packed=True)
    difference = max(abs(a - b) for a, b in zip(dense, varlen))
    figure(
        f"losses {dense[0]:.3f} to {dense[-1]:.3f}, at most {difference:.1e} apart over {STEPS}"
        " steps (1e-3 allowed)"
    )
    assert difference < 1e-3
    assert dense[-1] < dense[0] - 0.5  # the model learns


@pytest.mark.slow
def test_report_row_06_finds_shifted_document_bounds() -> None:
    """With bounds seven tokens late, documents see each other, and the losses differ."""
    dense, varlen = losses(packed=False), losses(packed=True, fault=7)
    assert max(abs(a - b) for a, b in zip(dense, varlen)) > 1e-3
