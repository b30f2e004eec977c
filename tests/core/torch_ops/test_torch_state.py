"""PyTorch's global state: export is told apart from torch.compile."""

from pathlib import Path

import pytest
import torch

from nsa_core.torch_ops.torch_state import is_exporting

PACKAGES = Path(__file__).resolve().parents[3] / "packages"


class Marked(torch.nn.Module):
    """Adds 1 while it is exported."""

    def forward(self, x):
        return x + 1 if is_exporting() else x


@pytest.fixture
def old_torch(monkeypatch):
    """torch.compiler.is_exporting() as it is in functions that PyTorch 2.11 compiles."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)


@pytest.mark.usefixtures("old_torch")
def test_compiled_code_is_not_exported():
    x = torch.zeros(2)
    assert torch.equal(Marked()(x), x)
    assert torch.equal(torch.compile(Marked(), backend="eager", fullgraph=True)(x), x)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_code_is_exported(strict):
    x = torch.zeros(2)
    program = torch.export.export(Marked(), (x,), strict=strict)
    assert torch.equal(program.module()(x), x + 1)


def test_nothing_else_asks_torch():
    callers = [
        path.name
        for path in PACKAGES.glob("*/src/**/*.py")
        if "compiler.is_exporting" in path.read_text(encoding="utf-8")
    ]
    assert callers == ["torch_state.py"]
