"""Divide the heads of a group over programs, and add the parts of dk and dv that they compute."""

from __future__ import annotations

import triton
from torch import Tensor

from nsa_backend_triton.host.launch_cache import Launch
from nsa_backend_triton.shared.parts import sum_parts

SUM_BLOCK = 512  # elements of a program of sum_parts


def head_parts(group: int, programs: int, least: int) -> int:
    """Return into how many parts the heads of a group are divided, a divisor of ``group``.

    It is the smallest one that gives ``least`` programs, where one part has ``programs``.
    """
    divisors = (n for n in range(1, group) if group % n == 0 and n * programs >= least)
    return next(divisors, group)


def sum_launch(k: Tensor, v: Tensor, num_parts: int, sequences: int, *, varlen: bool) -> Launch:
    """Return the launch of sum_parts for the parts of the gradients of ``k`` and ``v``.

    Its arguments are the parts of dk and dv, fp32 [num_parts, *shape]; dk and dv; and, with
    ``varlen``, the first key of each of the ``sequences`` documents, int32 [sequences + 1].
    """
    programs = sum(triton.cdiv(x.numel(), SUM_BLOCK) for x in (k, v))
    rows = (x.shape[-2] * x.shape[-1] for x in (k, v))
    return Launch(
        sum_parts, (programs,), sequences, k.numel(), v.numel(), *rows, num_parts,
        BLOCK_SIZE=SUM_BLOCK, VARLEN=varlen, num_warps=4,
    )  # fmt: skip
