"""The sizes of convert_learning.py: the model, its lessons before and after the conversion."""

from __future__ import annotations

import dataclasses

from nsa_core import NSAConfig


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the training: rows of one kind.

    Attributes:
        length: Tokens per row.
        pairs: Pairs per row.
        batch: Rows per step.
        steps: Number of steps.
        text_share: Share of the bytes of the text that are targets; the answers always are. With
            many more bytes than answers, a model forgets to recall.
        enough: Recall on held-out rows at which the part ends early; above 1: never.
    """

    length: int
    pairs: int
    batch: int
    steps: int
    text_share: float = 1.0
    enough: float = 2.0


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a run.

    Attributes:
        layer: Heads and NSA's sizes.
        layers: Number of blocks of the model.
        keys: Number of keys in the vocabulary.
        before: The dense training. Short rows teach the model to recall; later rows only place the
            pairs further apart.
        length: Tokens of the rows after the conversion.
        pairs: Pairs in such a row.
        batch: Such rows per step.
        first_stage: Steps in which NSA trains phi and the gates only.
        steps: Steps after the conversion, the first stage included.
        eval_every: Steps between two points of the curves.
        held_out: Number of held-out rows.
        learning_rate: Peak learning rate of the dense training; after the conversion it is half.
    """

    layer: NSAConfig
    layers: int
    keys: int
    before: tuple[Part, ...]
    length: int
    pairs: int
    batch: int
    first_stage: int
    steps: int
    eval_every: int
    held_out: int
    learning_rate: float

    @property
    def after(self) -> Part:
        """Return the training after the conversion."""
        return Part(self.length, self.pairs, self.batch, self.steps)


_SMALL = NSAConfig(
    dim=32,
    n_heads=2,
    n_kv_heads=1,
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=4,
    window_size=32,
)
SCALES = {
    "full": Scale(
        layer=NSAConfig(dim=256, n_heads=4, n_kv_heads=2, rope_base=500_000.0),
        layers=4,
        keys=128,
        before=(
            Part(16, 4, 512, 600, 0.0, enough=0.97),
            Part(32, 8, 512, 900, 0.0, enough=0.97),
            Part(64, 8, 256, 1500, 0.0, enough=0.97),
            Part(256, 8, 64, 800, 0.05, enough=0.95),
            Part(1024, 8, 32, 800, 0.02, enough=0.95),
            Part(4096, 8, 8, 800, 0.01, enough=0.95),
            Part(16384, 8, 4, 500, 0.01),
        ),
        length=16384,
        pairs=8,
        batch=4,
        first_stage=200,
        steps=1500,
        eval_every=100,
        held_out=32,
        learning_rate=1e-3,
    ),
    "tiny": Scale(
        layer=_SMALL,
        layers=2,
        keys=16,
        before=(Part(64, 8, 4, 6, 0.5), Part(256, 8, 1, 2)),
        length=256,
        pairs=8,
        batch=1,
        first_stage=4,
        steps=8,
        eval_every=2,
        held_out=16,
        learning_rate=3e-3,
    ),
}
