"""A fake FlashAttention-2 that runs on the CPU and checks its arguments as strictly as the library.

So does a fake FlashAttention-4, whose kernels need a GPU.

It follows the library's documented semantics, with dense float64 attention and explicit masks, one
document at a time. Results that the library leaves uninitialized are NaN. Arguments that would
crash the library raise.
"""

from __future__ import annotations

import inspect
import itertools
import types
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from nsa_backend_fa2 import flash4, providers

FLASH4 = "4.0.0b36"
PROVIDERS = ("2.5.8", "2.6.3", "2.7.4", "2.8.3.post2", "aten", FLASH4)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def visible(rows: int, keys: int, causal: bool, left: int, right: int, longest: int) -> Tensor:
    """Return the visible keys, bool [rows, keys], with the mask aligned bottom-right.

    As in the library, a window of ``longest`` keys or more counts as unbounded.
    """
    left = -1 if left >= longest else left
    right = -1 if right >= longest else right
    right = 0 if causal else right
    key = torch.arange(keys)
    row = torch.arange(rows)[:, None] + keys - rows
    mask = torch.ones(rows, keys, dtype=torch.bool)
    if right >= 0:
        mask &= key <= row + right
    if left >= 0:
        mask &= key >= row - left
    return mask


def check_operands(*tensors: Tensor) -> None:
    q, k, v = tensors[:3]
    require(k.shape[-3] > 0, "division by zero: no keys")
    require(
        q.shape[-1] % 8 == 0 and q.shape[-1] <= 256,
        "head width must be a multiple of 8, at most 256",
    )
    require(q.shape[-1] == k.shape[-1] == v.shape[-1], "q, k, v must share one head width")
    require(q.shape[-2] % k.shape[-2] == 0, "kv heads must divide query heads")
    for x in tensors:
        require(x.dtype == q.dtype, "all operands must have one dtype")
        require(x.stride(-1) == 1, "last axis must be contiguous")
        per_load = 16 // x.element_size()
        misaligned = [
            stride
            for size, stride in zip(x.shape[:-1], x.stride()[:-1])
            if size > 1 and stride % per_load
        ]
        require(not misaligned and x.data_ptr() % 16 == 0, "misaligned address")


def attend_document(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor, splits: int = 1
) -> tuple[Tensor, ...]:
    """Return o [Sq, H, D], lse [H, Sq], and q, k and v in float64, with k and v per query head.

    With several ``splits`` of the keys, a split with a NaN sum is missing in the lse.
    """
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(repeat, 1),
        v.double().repeat_interleave(repeat, 1),
    )
    # Like the library, mask before scaling: with a negative scale, hidden keys get a score of +inf.
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf) * scale
    row_max = (
        scores.amax(-1, keepdim=True)
        if scores.shape[-1]
        else scores.new_zeros(*scores.shape[:-1], 1)
    )
    weight = (scores - row_max.masked_fill(row_max == -torch.inf, 0)).exp()
    row_sum = weight.sum(-1, keepdim=True)
    parts = torch.stack([x.logsumexp(-1) for x in scores.chunk(splits, -1)])
    lse = parts.nan_to_num(nan=-torch.inf, neginf=-torch.inf).logsumexp(0)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # no keys, or NaN in every split
    p = weight / row_sum.masked_fill(row_sum == 0, 1)
    return torch.einsum("hqk,khd->qhd", p, v), lse, q, k, v


def attend_document_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [Sq, H, D], and dk and dv [Sk, G, D] of one document.

    dk and dv are 0 if it has no query, as in the library (flash_bwd_kernel.h of 2.5.0 and later).
    """
    groups = k.shape[1]
    repeat = q.shape[1] // groups
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(repeat, 1),
        v.double().repeat_interleave(repeat, 1),
    )
    do, o = do.double(), o.double()
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, -torch.inf) * scale
    p = (scores - lse.double()[..., None]).exp()
    dv = torch.einsum("hqk,qhd->khd", p, do)
    ds = p * (torch.einsum("qhd,khd->hqk", do, v) - (do * o).sum(-1).t()[..., None])
    dq = torch.einsum("hqk,khd->qhd", ds, k) * scale
    dk = torch.einsum("hqk,qhd->khd", ds, q) * scale
    return dq, dk.unflatten(1, (groups, repeat)).sum(2), dv.unflatten(1, (groups, repeat)).sum(2)


def document_slices(cu: Tensor, total: int) -> list[slice]:
    require(cu.dtype == torch.int32 and cu.is_contiguous(), "cu_seqlens must be contiguous int32")
    bounds = cu.tolist()
    require(
        bounds[0] >= 0 and bounds == sorted(bounds) and bounds[-1] <= total, "illegal memory access"
    )
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


class Library:
    """The computations behind the fake functions; ``calls`` records the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        self.calls.append(
            {"direction": "forward", "q": tuple(q.shape), "k": tuple(k.shape), **options}
        )
        check_operands(q, k, v)
        scale, causal = options["scale"], options["causal"]
        left, right = options["left"], options["right"]
        o = torch.full(q.shape, torch.nan, dtype=q.dtype)
        stats = torch.float32
        if options["cu_q"] is None:
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=stats)
            mask = visible(q.shape[1], k.shape[1], causal, left, right, k.shape[1])
            for b in range(q.shape[0]):
                o[b], lse[b] = attend_document(q[b], k[b], v[b], scale, mask, splits=2)[:2]
            return o, lse
        max_q, max_k = options["max_q"], options["max_k"]
        documents = list(
            zip(document_slices(options["cu_q"], len(q)), document_slices(options["cu_k"], len(k)))
        )
        unbounded = left < 0 or left >= max_k
        # In this case the library swaps query rows and heads of a group, and assumes one row per
        # document.
        swapped = max_q == 1 and q.shape[1] > k.shape[1] and unbounded and right < 0
        require(not swapped or len(q) == len(documents), "shape is invalid for input")
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=stats)
        for rows, keys in documents:
            count, length = rows.stop - rows.start, keys.stop - keys.start
            require(count <= max_q and length <= max_k, "longer than max_seqlen")
            mask = visible(count, length, causal, left, right, max_k)
            o[rows], lse[:, rows] = attend_document(q[rows], k[keys], v[keys], scale, mask)[:2]
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(
            {"direction": "backward", "q": tuple(q.shape), "k": tuple(k.shape), **options}
        )
        check_operands(q, k, v, do, o)
        require(lse.is_contiguous(), "lse must be contiguous")
        scale, causal = options["scale"], options["causal"]
        left, right = options["left"], options["right"]
        grads = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (q, k, v)]
        if options["cu_q"] is None:
            mask = visible(q.shape[1], k.shape[1], causal, left, right, k.shape[1])
            for b in range(q.shape[0]):
                sequence_grads = attend_document_backward(
                    do[b], q[b], k[b], v[b], o[b], lse[b], scale, mask
                )
                for grad, sequence_grad in zip(grads, sequence_grads):
                    grad[b] = sequence_grad
            return grads[0], grads[1], grads[2]
        for rows, keys in zip(
            document_slices(options["cu_q"], len(q)), document_slices(options["cu_k"], len(k))
        ):
            count, length = rows.stop - rows.start, keys.stop - keys.start
            mask = visible(count, length, causal, left, right, options["max_k"])
            document_grads = attend_document_backward(
                do[rows], q[rows], k[keys], v[keys], o[rows], lse[:, rows], scale, mask
            )
            for grad, index, document_grad in zip(grads, (rows, keys, keys), document_grads):
                grad[index] = document_grad
        return grads[0], grads[1], grads[2]


_WINDOWS = {
    "2.5": "window_size",
    "2.6": "window_size, softcap",
    "2.7": "window_size_left, window_size_right, softcap",
}
_VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "


def _signature(head: str, release: str, varlen: bool, backward: bool) -> inspect.Signature:
    """Return the signature of the release's function, from the sources of 2.5.8 to 2.8.3."""
    text = (
        f"{head}, {_VARLEN if varlen else ''}dropout_p, softmax_scale, causal, {_WINDOWS[release]},"
        " alibi_slopes, "
    )
    text += "deterministic, rng_state=None" if backward else "return_softmax"
    if varlen and not backward:
        text += ", block_table" if release == "2.5" else ", block_table=None"
    return inspect.signature(eval(f"lambda {text}: None"))


def flash_attn_interface(release: str, library: Library) -> types.SimpleNamespace:
    """Return a fake module `flash_attn.flash_attn_interface` of ``release``, over ``library``.

    The release is "2.5", "2.6", or "2.7", which also stands for 2.8.
    """

    def unpack(arguments: dict[str, Any]) -> dict[str, Any]:
        require(
            arguments["dropout_p"] == 0
            and arguments.get("softcap", 0) == 0
            and arguments["alibi_slopes"] is None,
            "dropout, softcap and alibi_slopes must be off",
        )
        left, right = arguments.get("window_size") or (
            arguments["window_size_left"],
            arguments["window_size_right"],
        )
        options = {
            "scale": arguments["softmax_scale"],
            "causal": arguments["causal"],
            "left": left,
            "right": right,
        }
        names = {
            "cu_q": "cu_seqlens_q",
            "cu_k": "cu_seqlens_k",
            "max_q": "max_seqlen_q",
            "max_k": "max_seqlen_k",
        }
        return options | {ours: arguments.get(theirs) for ours, theirs in names.items()}

    def forward(varlen: bool) -> Any:
        signature = _signature("q, k, v", release, varlen, backward=False)

        def function(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            arguments = signature.bind(*args, **kwargs).arguments
            require(arguments["return_softmax"] is False, "return_softmax needs dropout")
            options = unpack(arguments)
            o, lse = library.forward(arguments["q"], arguments["k"], arguments["v"], **options)
            if varlen and release == "2.5":
                lse = pad_lse(lse, options["cu_q"], options["max_q"])
            return (
                (o, lse, None, None)
                if release == "2.7"
                else (o, None, None, None, o, lse, None, None)
            )

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    def backward(varlen: bool) -> Any:
        signature = _signature(
            "dout, q, k, v, out, softmax_lse, dq, dk, dv", release, varlen, backward=True
        )

        def function(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            options, lse = unpack(arguments), arguments["softmax_lse"]
            if varlen and release == "2.5":
                lse = unpad_lse(lse, options["cu_q"], len(arguments["q"]))
            options["deterministic"] = arguments["deterministic"]
            tensors = (arguments[n] for n in ("dout", "q", "k", "v", "out"))
            grads = library.backward(*tensors, lse, **options)
            for name, grad in zip(("dq", "dk", "dv"), grads):
                arguments[name].copy_(grad)

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return types.SimpleNamespace(
        flash_attn_with_kvcache=with_kvcache(release, library),
        _flash_attn_forward=forward(False),
        _flash_attn_varlen_forward=forward(True),
        _flash_attn_backward=backward(False),
        _flash_attn_varlen_backward=backward(True),
    )


def with_kvcache(release: str, library: Library) -> Any:
    """Return a fake flash_attn_with_kvcache of ``release``, for one query per sequence.

    The cache is addressed by cache_batch_idx, or by block_table if it is paged.
    """
    text = (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,"
        " cache_seqlens=None, "
    )
    text += "cache_batch_idx=None, block_table=None, softmax_scale=None, causal=False, num_splits=0"
    signature = inspect.signature(
        eval(f"lambda {text}{'' if release == '2.5' else ', return_softmax_lse=False'}: 0")
    )

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        q, k, v = (arguments[name] for name in ("q", "k_cache", "v_cache"))
        lengths = arguments["cache_seqlens"]
        library.calls.append(
            {"direction": "cache", "q": tuple(q.shape), "k": tuple(k.shape), **kwargs}
        )
        check_operands(q, k, v)
        table, index = arguments.get("block_table"), arguments.get("cache_batch_idx")
        require((table is None) != (index is None), "either block_table or cache_batch_idx")
        require(
            table is None or k.shape[1] % 256 == 0,
            "Paged KV cache block size must be divisible by 256",
        )
        for x in (lengths, index if table is None else table):
            require(
                x.dtype == torch.int32 and x.is_contiguous() and len(x) == len(q),
                "must be contiguous int32 with one row per sequence",
            )
        o, lse = torch.full_like(q, torch.nan), torch.full((len(q), q.shape[2], 1), torch.nan)
        for b, length in enumerate(lengths.tolist()):
            all_pages = index[b : b + 1] if table is None else table[b]
            require(length <= len(all_pages) * k.shape[1], "illegal memory access")
            pages = all_pages[: -(-length // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
            mask = torch.ones(1, length, dtype=torch.bool)
            scale = arguments["softmax_scale"]
            o[b], lse[b] = attend_document(q[b], keys, values, scale, mask, splits=2)[:2]
        return (o, lse) if arguments["return_softmax_lse"] else o

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def pad_lse(lse: Tensor, cu: Tensor, longest: int) -> Tensor:
    padded = torch.full((len(cu) - 1, lse.shape[0], longest), torch.nan)
    for i, rows in enumerate(document_slices(cu, lse.shape[1])):
        padded[i, :, : rows.stop - rows.start] = lse[:, rows]
    return padded


def unpad_lse(lse: Tensor, cu: Tensor, total: int) -> Tensor:
    require(
        lse.dim() == 3 and lse.shape[0] == len(cu) - 1, "lse must be [documents, heads, longest]"
    )
    flat = torch.full((lse.shape[1], total), torch.nan)
    for i, rows in enumerate(document_slices(cu, total)):
        flat[:, rows] = lse[i, :, : rows.stop - rows.start]
    return flat


def aten_ops(library: Library) -> types.SimpleNamespace:
    """Return fakes of the FlashAttention-2 operators in torch.ops.aten, over ``library``.

    They bind their arguments by PyTorch's own schemas.
    """

    def signature(op: Any) -> inspect.Signature:
        parameters = []
        for argument in op._schema.arguments:
            kind = (
                inspect.Parameter.KEYWORD_ONLY
                if argument.kwarg_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD
            )
            has_default = argument.has_default_value()
            default = argument.default_value if has_default else inspect.Parameter.empty
            parameters.append(inspect.Parameter(argument.name, kind, default=default))
        return inspect.Signature(parameters)

    def unpack(arguments: dict[str, Any]) -> dict[str, Any]:
        require(arguments["dropout_p"] == 0, "dropout must be off")
        names = {
            "scale": "scale",
            "causal": "is_causal",
            "left": "window_size_left",
            "right": "window_size_right",
            "cu_q": "cum_seq_q",
            "cu_k": "cum_seq_k",
            "max_q": "max_q",
            "max_k": "max_k",
        }
        return {ours: arguments[theirs] for ours, theirs in names.items()}

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        op = torch.ops.aten._flash_attention_forward.default
        arguments = signature(op).bind(*args, **kwargs).arguments
        require(arguments["return_debug_mask"] is False, "return_debug_mask")
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        o, lse = library.forward(q, k, v, **unpack(arguments))
        return o, lse, None, None, None

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        op = torch.ops.aten._flash_attention_backward.default
        arguments = signature(op).bind(*args, **kwargs).arguments
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        return library.backward(*(arguments[n] for n in names), **unpack(arguments))

    return types.SimpleNamespace(
        _flash_attention_forward=forward, _flash_attention_backward=backward
    )


def flash4_interface(library: Library) -> types.SimpleNamespace:
    """Return a fake module `flash_attn.cute.interface` over ``library``."""

    def options(q: Tensor, causal: bool, softmax_scale: float, packing: dict[str, Any]) -> Any:
        require(causal and set(packing) in (set(), set(_VARLEN[:-2].split(", "))), "arguments")
        names = zip(("cu_q", "cu_k", "max_q", "max_k"), _VARLEN[:-2].split(", "))
        shared = {"scale": softmax_scale, "causal": causal, "left": -1, "right": 0}
        return shared | {ours: packing.get(theirs) for ours, theirs in names}

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor | None,
        return_lse: bool,
        softmax_scale: float,
        causal: bool,
        **packing: Any,
    ) -> tuple[Any, ...]:
        require(return_lse, "lse is None")
        o, lse = library.forward(q, k, v, **options(q, causal, softmax_scale, packing))
        if out is not None:
            check_operands(q, k, v, out)
            require(0 not in out.stride(), "out must not have broadcast dimensions")
            o = out.copy_(o)
        # A row whose sum is 0 or NaN has an LSE of -inf. No split of the keys is left out of it.
        nan = o[..., 0].isnan().transpose(-1, -2) & ~lse.isnan()
        return o, lse.masked_fill(nan | (lse == torch.inf), -torch.inf), None, None, None

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        do: Tensor,
        lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
        causal: bool,
        **packing: Any,
    ) -> None:
        check_operands(q, k, v, dq)
        require(dk.is_contiguous() and dv.is_contiguous(), "dk and dv must be contiguous")
        grads = library.backward(do, q, k, v, o, lse, **options(q, causal, softmax_scale, packing))
        for grad, result in zip((dq, dk, dv), grads):
            grad.copy_(result)

    return types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)


def make(name: str, library: Library) -> providers.Provider:
    """Return the provider ``name`` of PROVIDERS over ``library``."""
    if name == "aten":
        return providers.TorchFlash(aten_ops(library))
    if name == FLASH4:
        return flash4.FlashAttention4(flash4_interface(library), Version(name))
    version = Version(name)
    release = "2.7" if version >= Version("2.7") else f"2.{version.minor}"
    return providers.FlashAttnPackage(flash_attn_interface(release, library), version)
