"""The truth: Native Sparse Attention in float64 on the CPU, in plain loops.

The oracle is written from docs/explanation/semantics.md alone and shares no code with the backends
under test: of nsa_core it imports the fields of two dataclasses and the errors. Every function
takes tensors of any dtype and device in the contract's layouts and returns float64 tensors on the
CPU. It is fast enough for S up to a few thousand. In longer sequences, ``rows=`` evaluates only
sampled query rows.
"""

from nsa_verify.oracle.branches import cmp, combine, sel, win
from nsa_verify.oracle.layer import Projected, attention, layer, project
from nsa_verify.oracle.phi import compress, rope
from nsa_verify.oracle.rows import Truth
from nsa_verify.oracle.selection import RowScores, choose, row_scores, select

__all__ = [
    "Projected",
    "RowScores",
    "Truth",
    "attention",
    "choose",
    "cmp",
    "combine",
    "compress",
    "layer",
    "project",
    "rope",
    "row_scores",
    "sel",
    "select",
    "win",
]
