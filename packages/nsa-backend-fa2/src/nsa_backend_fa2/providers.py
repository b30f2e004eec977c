"""Providers of FlashAttention-2: the package flash-attn, or else the copy inside PyTorch.

A provider computes attention and its gradient, with GQA and a mask aligned bottom-right:

    batched  q [B, Sq, H, D]   k, v [B, Sk, G, D]   o [B, Sq, H, D]   lse [B, H, Sq]
    packed   q [T, H, D]       k, v [T, G, D]       o [T, H, D]       lse [H, T]

D is a multiple of 8 and at most 256. The log-sum-exp is a natural logarithm, and +inf for a row
without keys.

Only this module calls FlashAttention-2, and only this module handles the changes between releases
of flash-attn:

    2.6  adds the argument softcap; the log-sum-exp of packed rows changes from
         [documents, H, longest] to [H, T]
    2.7  splits the argument window_size in two; the forward returns 4 values instead of 8
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from nsa_core.contract import Reason
from nsa_core.packing import token_positions

OLDEST, TOO_NEW = Version("2.5"), Version("3")
INSTALL = (
    "pip install --no-build-isolation flash-attn; the build is much faster for one GPU"
    " architecture: set FLASH_ATTN_CUDA_ARCHS=80 (A100) or 90 (H100, H200) in the environment"
)
UPGRADE = "pip install --upgrade --no-build-isolation flash-attn"
REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation flash-attn"
_UNBOUNDED = -1  # window size of the libraries for "no limit"

Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]  # dq, dk and dv


@dataclasses.dataclass(frozen=True)
class Packed:
    """Boundaries of packed documents.

    Attributes:
        cu_q: int32 [documents + 1] on the device, first query row of each document.
        cu_k: int32 [documents + 1] on the device, first key row of each document.
        max_q: Upper bound of the query rows of a document.
        max_k: Upper bound of the key rows of a document.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    @property
    def arguments(self) -> dict[str, Any]:
        """The boundaries as keyword arguments of flash-attn and flash-attn-4."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return dict(zip(names, (self.cu_q, self.cu_k, self.max_q, self.max_k)))


@dataclasses.dataclass(frozen=True)
class Attention:
    """The options of an attention call.

    Attributes:
        scale: Scale of the scores.
        causal: Whether a row sees only keys up to its own; otherwise it sees all keys.
        window: If set, a row sees only the last ``window`` of these keys.
        packed: Boundaries of packed documents; None for a batch.
        deterministic: Whether the backward must give bitwise-identical results in every run.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    packed: Packed | None = None
    deterministic: bool = False

    @property
    def left(self) -> int:
        """Visible keys left of the row's own key, as the libraries count them."""
        return _UNBOUNDED if self.window is None else self.window - 1

    @property
    def right(self) -> int:
        """Visible keys right of the row's own key, as the libraries count them."""
        return 0 if self.causal else _UNBOUNDED


class Provider(Protocol):
    """An implementation of FlashAttention-2; ``title`` is its name and version."""

    title: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return o and lse; o is ``out`` if the provider can write there."""
        ...

    def backward(
        self, tensors: Sequence[Tensor], attention: Attention, out: Tensor | None = None
    ) -> Gradients:
        """Return dq, dk and dv; rows that belong to no document are uninitialized.

        Args:
            tensors: do, q, k, v, o and lse.
            attention: The options of the forward.
            out: Where to write dq, if the provider can; dq is then ``out``.
        """
        ...


class FlashAttnPackage:
    """The package flash-attn; ``interface`` is its module flash_attn.flash_attn_interface."""

    def __init__(self, interface: Any, version: Version) -> None:
        self._interface, self._version = interface, version
        self.title = f"flash-attn {version}"

    def _arguments(self, attention: Attention) -> dict[str, Any]:
        """Return the keyword arguments that forward and backward share, for this release."""
        arguments: dict[str, Any] = {
            "dropout_p": 0.0,
            "softmax_scale": attention.scale,
            "causal": attention.causal,
        }
        arguments["alibi_slopes"] = None
        if self._version >= Version("2.7"):
            arguments.update(window_size_left=attention.left, window_size_right=attention.right)
        else:
            arguments["window_size"] = (attention.left, attention.right)
        if self._version >= Version("2.6"):
            arguments["softcap"] = 0.0
        if attention.packed is not None:
            arguments.update(attention.packed.arguments)
        return arguments

    @property
    def with_cache(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """flash_attn_with_kvcache if it can return the log-sum-exp (since a 2.6 release)."""
        function: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
            self._interface, "flash_attn_with_kvcache", None
        )
        returns_lse = (
            function is not None and "return_softmax_lse" in inspect.signature(function).parameters
        )
        return function if returns_lse else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return o, which is not ``out``, and lse."""
        name = "_flash_attn_forward" if attention.packed is None else "_flash_attn_varlen_forward"
        function, arguments = getattr(self._interface, name), self._arguments(attention)
        if (
            self._version < Version("2.6")
            and "block_table" in inspect.signature(function).parameters
        ):
            arguments["block_table"] = None  # required argument without a default in these releases
        results = function(q, k, v, return_softmax=False, **arguments)
        o, lse = results[0], results[5 if len(results) == 8 else 1]
        if attention.packed is not None and lse.dim() == 3:  # [documents, H, longest]
            rows = token_positions(attention.packed.cu_q, len(q))
            lse = lse[rows.document, :, rows.position.clamp(max=lse.shape[2] - 1)].t().contiguous()
        return o, lse

    def backward(
        self, tensors: Sequence[Tensor], attention: Attention, out: Tensor | None = None
    ) -> Gradients:
        """Return dq, dk and dv; rows that belong to no document are uninitialized."""
        name = "_flash_attn_backward" if attention.packed is None else "_flash_attn_varlen_backward"
        *rows, lse = tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in rows[1:4]]
        if attention.packed is not None and self._version < Version("2.6"):
            lse = _padded(lse, attention.packed)
        arguments = self._arguments(attention)
        getattr(self._interface, name)(
            *rows, lse, *grads, deterministic=attention.deterministic, **arguments
        )
        return grads[0], grads[1], grads[2]


def _padded(
    lse: Tensor,  # [H, T]
    packed: Packed,
) -> Tensor:  # [documents, H, longest]
    """Return the log-sum-exp of packed rows padded to the longest document, for flash-attn 2.5."""
    rows = packed.cu_q[:-1, None].long() + torch.arange(packed.max_q, device=lse.device)
    return lse[:, rows.clamp(0, lse.shape[1] - 1)].transpose(0, 1).contiguous()


class TorchFlash:
    """PyTorch's FlashAttention-2: the aten operators behind torch.nn.attention.varlen."""

    title = f"PyTorch {torch.__version__}"

    def __init__(self, ops: Any = torch.ops.aten) -> None:
        self._ops = ops

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return o, which is not ``out``, and lse."""
        results = self._ops._flash_attention_forward(
            q,
            k,
            v,
            *_bounds(q, k, attention),
            0.0,
            attention.causal,
            False,
            scale=attention.scale,
            window_size_left=attention.left,
            window_size_right=attention.right,
        )
        return results[0], results[1]

    def backward(
        self, tensors: Sequence[Tensor], attention: Attention, out: Tensor | None = None
    ) -> Gradients:
        """Return dq, dk and dv; rows that belong to no document are uninitialized.

        Raises:
            RuntimeError: The call requires determinism, but
                torch.use_deterministic_algorithms(True) is not set.
        """
        if attention.deterministic and not torch_is_deterministic():
            raise RuntimeError(str(not_deterministic()))
        _, q, k, *_ = tensors
        # The state of the random generator for dropout, unused because dropout is 0.
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        gradients: Gradients = self._ops._flash_attention_backward(
            *tensors,
            *_bounds(q, k, attention),
            0.0,
            attention.causal,
            state,
            state,
            scale=attention.scale,
            window_size_left=attention.left,
            window_size_right=attention.right,
        )
        return gradients


def _bounds(
    q: Tensor, k: Tensor, attention: Attention
) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return cu_seqlens and maximum lengths of queries and keys, as aten's operators take them."""
    packed = attention.packed
    if packed is None:
        return None, None, q.shape[1], k.shape[1]
    return packed.cu_q, packed.cu_k, packed.max_q, packed.max_k


def torch_is_deterministic() -> bool:
    """Return whether torch.use_deterministic_algorithms(True) is set, and not to warn only."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def not_deterministic() -> Reason:
    """Return the reason why PyTorch's kernels cannot run a deterministic backward now."""
    return Reason(
        "not_deterministic",
        "PyTorch's FlashAttention-2 backward is deterministic only under"
        " torch.use_deterministic_algorithms(True)",
        "set it, or install flash-attn",
    )


@dataclasses.dataclass(frozen=True)
class Source:
    """A place to look for FlashAttention: a provider, or the reason why it has none."""

    name: str
    provider: Provider | None
    reason: Reason | None


def package_source(
    name: str,
    oldest: Version,
    install: str,
    upgrade: str,
    load: Callable[[Version], Provider | Reason],
) -> Source:
    """Look for a package.

    Args:
        name: Name of its distribution.
        oldest: The first version that serves.
        install: How to install it.
        upgrade: How to install a newer version.
        load: Imports the package, and returns its provider or the reason why it has none.
    """
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        reason = Reason("package_missing", f"the package {name} is not installed", install)
        return Source(name, None, reason)
    try:
        version = Version(text)
    except InvalidVersion:
        message = f"{name} has an invalid version: {text!r}"
        return Source(name, None, Reason("package_version", message, install))
    if version < oldest:
        message = f"{name} {text} is too old: needs {oldest}"
        return Source(name, None, Reason("package_too_old", message, upgrade))
    found = load(version)
    return Source(name, None, found) if isinstance(found, Reason) else Source(name, found, None)


def _flash_attn(version: Version) -> Provider | Reason:
    """Import the package flash-attn."""
    if version >= TOO_NEW:
        message = f"flash-attn {version} is too new: this backend supports 2.5 to 2.8"
        return Reason("package_too_new", message, "pip install 'flash-attn<3'")
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:
        message = (
            f"flash-attn {version} does not load with torch {torch.__version__}:"
            f" {type(error).__name__}: {error}"
        )
        hint = f"rebuild it for this torch: {REBUILD}"
        return Reason("package_abi_mismatch", message, hint)
    return FlashAttnPackage(interface, version)


def flash_attn_source() -> Source:
    """Look for the package flash-attn."""
    return package_source("flash-attn", OLDEST, INSTALL, UPGRADE, _flash_attn)


def _torch_flash() -> Source:
    """Look for FlashAttention-2 in PyTorch."""
    if torch.version.cuda is None or not torch.backends.cuda.is_flash_attention_available():
        message = f"torch {torch.__version__} is built without FlashAttention-2 for CUDA"
        reason = Reason("torch_without_flash", message, "install a CUDA build of torch")
        return Source("PyTorch", None, reason)
    return Source("PyTorch", TorchFlash(), None)


@functools.lru_cache(maxsize=1)
def sources() -> tuple[Source, ...]:
    """Return every source of FlashAttention-2 in order of preference, searched once per process."""
    return (flash_attn_source(), _torch_flash())


def first() -> Provider | None:
    """Return the provider of the first source that has one, or None."""
    return next((source.provider for source in sources() if source.provider is not None), None)


_override: ContextVar[Provider | None] = ContextVar("override", default=None)


@contextlib.contextmanager
def override(provider: Provider) -> Iterator[None]:
    """Use ``provider`` in place of the installed one inside the context, in this thread."""
    token = _override.set(provider)
    try:
        yield
    finally:
        _override.reset(token)


def active_provider() -> Provider:
    """Return the provider in use.

    Raises:
        RuntimeError: There is none; the message lists the reason of every source.
    """
    provider = _override.get() or first()
    if provider is None:
        raise RuntimeError("; ".join(str(source.reason) for source in sources()))
    return provider
