"""torch.compile: one compilation serves every block, and few serve all packings."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nsa_models.lm.model import LanguageModel

pytestmark = pytest.mark.slow  # tracing is slow


def test_one_compilation_serves_every_block(config, attention):
    torch._dynamo.reset()
    model = LanguageModel(dataclasses.replace(config, n_layers=6, attention=attention))
    counter = CompileCounterWithBackend("eager")
    tokens = torch.randint(256, (96,))
    packings = [
        [0, 40, 96, 96],
        [0, 10, 60, 96],
        [0, 3, 6, 9, 12, 20, 40, 90, 96],
        [0, 5, 6, 19, 22, 30, 44, 80, 96],
    ]
    bounds = [torch.tensor(p, dtype=torch.int32) for p in packings]
    expected = [model(tokens, b, 90, tokens) for b in bounds]
    for block in model.blocks:
        block.compile(backend=counter)
    losses = [model(tokens, bounds[0], 90, tokens)]
    first_count = counter.frame_count
    # Dense attention breaks the graph at its calls per document.
    assert first_count <= (1 if attention == "nsa" else 4)
    losses += [model(tokens, b, 90, tokens) for b in bounds[1:]]
    # Another number of documents compiles a second time, and nothing compiles a third time.
    assert counter.frame_count <= 2 * first_count
    torch.testing.assert_close(losses, expected)
