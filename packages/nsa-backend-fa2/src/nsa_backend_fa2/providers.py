"""The one file that calls FlashAttention-2: the flash-attn package, or else the copy of it inside
PyTorch.

A provider computes plain attention with equal head widths and its gradient, bottom-right aligned,
GQA native:
    q [B, Sq, H, D]  k, v [B, Sk, G, D]  o [B, Sq, H, D]
    lse [B, H, Sq]; packed rows [T, H, D], lse [H, T].
D is a multiple of 8, at most 256; the LSE is a natural logarithm, +inf for a row without keys.
Changes between releases of flash-attn are handled here and nowhere else:
    2.6  softcap joins the arguments; the LSE of packed rows is [H, T], it was [documents, H,
         longest]
    2.7  window_size becomes two arguments; the forward returns 4 values, it returned 8
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor

from nsa_core.contract import Reason
from nsa_core.packing import token_places

OLDEST, TOO_NEW = Version("2.5"), Version("3")
INSTALL = (
    "pip install --no-build-isolation flash-attn; it builds much quicker for one GPU architecture,"
    " with FLASH_ATTN_CUDA_ARCHS=80 (A100) or 90 (H100, H200) in the environment"
)
REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation flash-attn"
_ALL = -1  # the libraries' word for "no bound" in a window


@dataclasses.dataclass(frozen=True)
class Packed:
    """Row boundaries of documents, int32 [documents + 1] on the device, and bounds of the
    longest.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """Which keys a row sees: all of them, those up to it (``causal``), and of those the last
    ``window``.
    """

    scale: float
    causal: bool = True
    window: int | None = None
    packed: Packed | None = None
    deterministic: bool = False

    @property
    def left(self) -> int:
        """Keys to the left of the row's own, as the libraries count them."""
        return _ALL if self.window is None else self.window - 1

    @property
    def right(self) -> int:
        """Keys to the right of the row's own."""
        return 0 if self.causal else _ALL


class Provider(Protocol):
    """An implementation of FlashAttention-2."""

    @property
    def title(self) -> str:
        """Name and version."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """o and lse."""
        ...

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        attention: Attention,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv; rows outside every document are not written."""
        ...


class FlashAttnPackage:
    """The flash-attn package, ``interface`` being its module flash_attn.flash_attn_interface."""

    def __init__(self, interface: Any, version: Version) -> None:
        self._interface, self._version = interface, version

    @property
    def title(self) -> str:
        """Name and version."""
        return f"flash-attn {self._version}"

    def _arguments(self, attention: Attention) -> dict[str, Any]:
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
            arguments.update(cu_seqlens_q=attention.packed.cu_q, cu_seqlens_k=attention.packed.cu_k)
            arguments.update(
                max_seqlen_q=attention.packed.max_q, max_seqlen_k=attention.packed.max_k
            )
        return arguments

    @property
    def with_cache(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """flash_attn_with_kvcache, where it returns the LSE (from some 2.6 on)."""
        function: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
            self._interface, "flash_attn_with_kvcache", None
        )
        known = (
            function is not None and "return_softmax_lse" in inspect.signature(function).parameters
        )
        return function if known else None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """o and lse."""
        name = "_flash_attn_forward" if attention.packed is None else "_flash_attn_varlen_forward"
        function, arguments = getattr(self._interface, name), self._arguments(attention)
        if (
            self._version < Version("2.6")
            and "block_table" in inspect.signature(function).parameters
        ):
            arguments["block_table"] = None  # had no default then
        results = function(q, k, v, return_softmax=False, **arguments)
        o, lse = results[0], results[5 if len(results) == 8 else 1]
        return o, _unpadded(
            lse, attention.packed, q.shape[0]
        ) if attention.packed is not None else lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        attention: Attention,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""
        name = "_flash_attn_backward" if attention.packed is None else "_flash_attn_varlen_backward"
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if attention.packed is not None and self._version < Version("2.6"):
            lse = _padded(lse, attention.packed)
        arguments = self._arguments(attention)
        getattr(self._interface, name)(
            do, q, k, v, o, lse, *grads, deterministic=attention.deterministic, **arguments
        )
        return grads[0], grads[1], grads[2]


def _unpadded(
    lse: Tensor,  # [documents, H, longest], or already [H, T]
    packed: Packed,
    total: int,
) -> Tensor:  # [H, T]
    if lse.dim() == 2:
        return lse
    places = token_places(packed.cu_q, total)
    return lse[places.document, :, places.position.clamp(max=lse.shape[2] - 1)].t().contiguous()


def _padded(
    lse: Tensor,  # [H, T]
    packed: Packed,
) -> Tensor:  # [documents, H, longest]
    rows = packed.cu_q[:-1, None].long() + torch.arange(packed.max_q, device=lse.device)
    return lse[:, rows.clamp(0, lse.shape[1] - 1)].transpose(0, 1).contiguous()


class TorchFlash:
    """The FlashAttention-2 inside PyTorch, by the aten operators that torch.nn.attention.varlen
    wraps.
    """

    def __init__(self, ops: Any = torch.ops.aten) -> None:
        self._ops = ops

    @property
    def title(self) -> str:
        """Name and version."""
        return f"PyTorch {torch.__version__}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """o and lse."""
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
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        attention: Attention,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv.

        Raises:
            RuntimeError: a deterministic backward is asked for, and PyTorch's setting for
                deterministic algorithms is off.
        """
        if attention.deterministic and not torch_is_deterministic():
            raise RuntimeError(str(not_deterministic()))
        # state of the dropout's generator, which is not used
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = self._ops._flash_attention_backward(
            do,
            q,
            k,
            v,
            o,
            lse,
            *_bounds(q, k, attention),
            0.0,
            attention.causal,
            state,
            state,
            scale=attention.scale,
            window_size_left=attention.left,
            window_size_right=attention.right,
        )
        return dq, dk, dv


def _bounds(
    q: Tensor, k: Tensor, attention: Attention
) -> tuple[Tensor | None, Tensor | None, int, int]:
    if attention.packed is None:
        return None, None, q.shape[1], k.shape[1]
    return (
        attention.packed.cu_q,
        attention.packed.cu_k,
        attention.packed.max_q,
        attention.packed.max_k,
    )


def torch_is_deterministic() -> bool:
    """torch.use_deterministic_algorithms(True) is on, not merely warning."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def not_deterministic() -> Reason:
    """The reason why PyTorch's kernels do not take a deterministic backward now."""
    return Reason(
        "not_deterministic",
        "PyTorch's FlashAttention-2 backward repeats its bits only under"
        " torch.use_deterministic_algorithms(True)",
        "turn that on, or install flash-attn",
    )


@dataclasses.dataclass(frozen=True)
class Source:
    """A source that may have FlashAttention-2: a provider, or the reason why there is none."""

    name: str
    provider: Provider | None
    reason: Reason | None


def _flash_attn() -> Source:
    name = "flash-attn"
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Source(
            name,
            None,
            Reason("package_missing", "the package flash-attn is not installed", INSTALL),
        )
    try:
        version = Version(text)
    except InvalidVersion:
        return Source(
            name,
            None,
            Reason("package_version", f"flash-attn has no readable version: {text!r}", INSTALL),
        )
    if version < OLDEST:
        message = f"flash-attn {text} is too old: needs {OLDEST} (the window alone needs 2.3)"
        return Source(
            name,
            None,
            Reason(
                "package_too_old", message, "pip install --upgrade --no-build-isolation flash-attn"
            ),
        )
    if version >= TOO_NEW:
        message = f"flash-attn {text} is too new: this backend knows 2.5 to 2.8"
        return Source(name, None, Reason("package_too_new", message, "pip install 'flash-attn<3'"))
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:
        message = (
            f"flash-attn {text} does not load with torch {torch.__version__}:"
            f" {type(error).__name__}: {error}"
        )
        hint = f"rebuild it for this torch: {REBUILD}"
        return Source(name, None, Reason("package_abi_mismatch", message, hint))
    return Source(name, FlashAttnPackage(interface, version), None)


def _torch_flash() -> Source:
    if torch.version.cuda is None or not torch.backends.cuda.is_flash_attention_available():
        message = f"torch {torch.__version__} is built without FlashAttention-2 for CUDA"
        return Source(
            "PyTorch", None, Reason("torch_without_flash", message, "install a CUDA build of torch")
        )
    return Source("PyTorch", TorchFlash(), None)


@functools.lru_cache(maxsize=1)
def sources() -> tuple[Source, ...]:
    """Every source of FlashAttention-2, in the order of preference; looked up once per process."""
    return (_flash_attn(), _torch_flash())


def first() -> Provider | None:
    """The provider to use: the first there is."""
    return next((source.provider for source in sources() if source.provider is not None), None)


_override: ContextVar[Provider | None] = ContextVar("override", default=None)


@contextlib.contextmanager
def override(provider: Provider) -> Iterator[None]:
    """Use ``provider`` inside the block, in this thread."""
    token = _override.set(provider)
    try:
        yield
    finally:
        _override.reset(token)


def serving() -> Provider:
    """The provider in use.

    Raises:
        RuntimeError: there is none; the message has every reason.
    """
    provider = _override.get() or first()
    if provider is None:
        raise RuntimeError("; ".join(str(source.reason) for source in sources()))
    return provider
