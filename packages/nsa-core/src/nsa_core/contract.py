"""The contract between nsa_core and a backend: all a plugin author needs to read. No torch here.

A backend is a distribution with an entry point in group ``nsa.backends`` that names a torch-free
module with

    @hookimpl
    def nsa_register_backends() -> BackendSpec: ...

(or ``-> Unavailable``, when the plugin already knows that it has nothing to run here). A backend
fills any of five slots, each alone. Shapes are for [B, S, heads, D]; packed calls drop B, and carry
``cu_seqlens`` (int32, on the device) and ``max_seqlen`` (host int). A slot is a pair of plain
functions:

    cmp      forward(q, k_cmp, v_cmp, *, call) -> o, lse
             backward(do, q, k_cmp, v_cmp, o, lse, *, call) -> dq, dk_cmp, dv_cmp
    select   forward(q, k_cmp, lse, *, call) -> blocks
    sel      forward(q, k, v, blocks, *, call) -> o, lse
             backward(do, q, k, v, blocks, o, lse, *, call) -> dq, dk, dv
    win      forward(q, k, v, *, call) -> o, lse
             backward(do, q, k, v, o, lse, *, call) -> dq, dk, dv
    combine  forward(gates, o_cmp, o_sel, o_win, *, call) -> o
             backward(do, gates, o_cmp, o_sel, o_win, *, call) -> dgates, do_cmp, do_sel, do_win

    q [B,S,Hq,Dk]  k [B,S,G,Dk]  v [B,S,G,Dv]  k_cmp [B,n_c,G,Dk]  v_cmp [B,n_c,G,Dv]  o [B,S,Hq,Dv]
    lse    [B,Hq,S] natural log, fp32 (fp64 for fp64 q), -inf where no key is visible; packed [Hq,T]
    blocks int32 [B,S,G,n], local to the document; `select` returns them ascending, -1 at the end;
           `sel` accepts any order, duplicates, -1, out-of-range and future blocks (the last two are
           not read)
    gates  [B,S,Hq,3] fp32 (fp64 for fp64) in the order cmp, sel, win

    Packed k_cmp has T // d rows. The rows of document i start at the sum of num_compressed() of the
    documents before it; the tail is never read, and its gradient is zero.

A slot may also have a decode form, forward only: the newest queries of B sequences over keys in a
cache. `combine` needs none, its forward serves.

    cmp      decode(q, k_cmp, v_cmp, *, call) -> o, lse
    select   decode(q, k_cmp, lse, *, call) -> blocks
    sel      decode(q, k, v, blocks, *, call) -> o, lse
    win      decode(q, k, v, *, call) -> o, lse

    q      [B,m,Hq,Dk]     row r of sequence b is its token starts[b] + r; a row at or past
                           lengths[b] is padding: its o is 0, its lse -inf, its blocks -1; m is 1, a
                           few, or thousands: a chunk of a long prompt
    k, v   [P,page,G,D]    sel: token t of sequence b is row t % page of page
                           block_table[b, t // page]
    k_cmp  [P,page/d,G,D]  compressed token i likewise, with page / d for page; page is a multiple
                           of l'
    k, v   [B,R,G,D]       win: a ring, token t of sequence b at row t % R; R >= w + m - 1

    Here ``call`` is a DecodeCall: ``starts`` and ``lengths`` are the tokens of each sequence before
    and after this step. A cache already holds this step's own tokens. Entries of block_table past
    the last token of a sequence, and memory past it, are never read. A step that is replayed from a
    CUDA graph finds new numbers in the same tensors.

In all other calls ``call`` is a SlotCall. nsa_core wraps the pair into a torch operator: schema,
shape inference for torch.compile, autograd, input and output checks, the current CUDA device, and
calls with nothing to compute (no token, no compressed token, `sel` given n = 0 blocks) are its
work, not the backend's. Inputs reach a backend with stride(-1) == 1: a tensor laid out otherwise is
copied once. Returned tensors are new, contiguous, and alias no input. The operators run below
autograd: torch.func.vjp works inside a backward, torch.autograd.grad does not. Of nsa_core, a
backend imports this module, layout, packing, fold (cmp as a causal attention) and dryrun (its
workspace), and nothing else. What each slot computes: docs/semantics.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pluggy

from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry

if TYPE_CHECKING:
    import torch

API_VERSION = (1, 0)  # (major, minor): a plugin for another major, or a later minor, is not loaded
PROJECT = "nsa"
ENTRY_POINT_GROUP = "nsa.backends"
SLOTS = ("cmp", "select", "sel", "win", "combine")
BRANCHES = ("cmp", "sel", "win")
# A call that brings no plan has one of two: that of no seq_len, and from so many tokens on that of
# this seq_len.
LONG_SEQUENCE = 49152
PHASES = ("prefill", "decode")
FUSED = ("step", "append", "gates")
DTYPES = ("bfloat16", "float16", "float32", "float64")

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a backend does not take a request."""

    code: str  # stable, snake_case: "sm_too_old"
    message: str  # "needs sm_90, this GPU is sm_80"
    hint: str = ""  # "use triton"

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of one slot: hashable metadata, no tensors."""

    slot: str
    geometry: BlockGeometry
    n_heads: int
    n_kv_heads: int
    head_dim: int  # Dk
    v_head_dim: int  # Dv
    dtype: str = "float32"
    device: str = "cpu"  # a torch device type
    capability: tuple[int, int] | None = None  # of the CUDA device: (8, 0)
    phase: str = "prefill"
    needs_grad: bool = False
    deterministic: bool = False
    varlen: bool = False  # packed documents
    batch: int | None = None  # sequences, or documents when packed; None: not known when planning
    seq_len: int | None = None  # tokens per sequence, or in all when packed; None: not known
    # decode: tokens of a page of the cache; None: a sequence lies in one piece
    page_size: int | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name, allowed in (("slot", SLOTS), ("phase", PHASES)):
            if getattr(self, name) not in allowed:
                wrong.append(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        wrong += self._of_a_wrong_kind()
        if wrong:
            raise InvalidInput("; ".join(wrong))
        if self.n_heads % self.n_kv_heads:
            wrong.append(f"{self.n_heads} query heads do not divide over {self.n_kv_heads}")
        if self.phase == "decode" and (self.needs_grad or self.varlen):
            wrong.append(
                "decode has no gradient and takes no packed documents: needs_grad and varlen must"
                " be False"
            )
        if self.page_size is not None and self.page_size % self.geometry.select_block_size:
            size = self.geometry.select_block_size
            wrong.append(
                f"page_size must be a multiple of select_block_size {size}, got {self.page_size}"
            )
        if self.dtype not in DTYPES:
            wrong.append(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if wrong:
            raise InvalidInput("; ".join(wrong))

    def _of_a_wrong_kind(self) -> list[str]:
        """Sizes that are no integers or out of range, and flags that are no bools."""
        wrong = []
        least = dict.fromkeys(("n_heads", "n_kv_heads", "head_dim", "v_head_dim", "page_size"), 1)
        for name, low in {**least, "batch": 0, "seq_len": 0}.items():
            value, may_lack = getattr(self, name), name in ("batch", "seq_len", "page_size")
            if may_lack and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                wrong.append(
                    f"{name} must be an integer >= {low}{' or None' * may_lack}, got {value!r}"
                )
        for name in ("needs_grad", "deterministic", "varlen"):
            if not isinstance(getattr(self, name), bool):
                wrong.append(f"{name} must be True or False, got {getattr(self, name)!r}")
        return wrong


@dataclasses.dataclass(frozen=True)
class SlotCall:
    """What a slot's functions are told besides tensors."""

    geometry: BlockGeometry
    scale: float
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1], on the device; None: not packed
    max_seqlen: int = 0  # length of the longest sequence, or a bound of it
    deterministic: bool = False  # the same bits every run are demanded


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """What a slot's decode form is told besides tensors: where the cached tokens of each sequence
    lie.
    """

    geometry: BlockGeometry
    scale: float
    starts: torch.Tensor  # int32 [B], tokens of each sequence before this step
    lengths: torch.Tensor  # int32 [B], after it; starts <= lengths <= starts + m
    # int32 [B, pages], page of the store that holds tokens page * i .. page * (i + 1) - 1
    block_table: torch.Tensor
    max_len: int  # host bound of lengths, by which a grid is sized


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """One slot of a backend. Functions are named "module:function" and imported when a plan first
    uses them.
    """

    forward: str
    backward: str | None = None  # None: forward only (`select` needs none)
    decode: str | None = None  # the decode form; None: prefill only
    evidence: tuple[
        str, ...
    ] = ()  # a profile of a call shows at least one event whose name holds one of these
    workspace: str | None = (
        # "module:function" of Request -> peak bytes of forward (and backward) beyond the inputs
        None
    )
    decode_workspace: str | None = None  # the same of the decode form
    # the same input gives the same bits, forward and backward, without being asked
    deterministic: bool = True
    # packed: the host reads cu_seqlens, by packing.host_boundaries; not in a CUDA graph
    reads_boundaries: bool = False
    # tokens of a call that reaches every kernel of the slot: what Plan.warmup() runs
    warmup_tokens: int = 128


@dataclasses.dataclass(frozen=True)
class BackendSpec:
    """A backend: its slots, and a probe that says what it can do here.

    ``probe`` names a function Request -> Sequence[Reason]: cheap, without side effects, returning
    ALL reasons against the request (empty: the backend takes it). It is called only for slots
    listed in ``slots``. ``priority`` orders `auto` among the accepting backends, highest first; a
    slot may override it, and ``rank``, where given, a request: it names a function Request -> int,
    as cheap as the probe, asked about requests that it accepts.

    ``fused`` maps the name of a fused decode form to its function, used where every slot of a plan
    is this backend's:

        step    (q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, *, call) -> o, blocks
                the five slots at once
        append  (q, k, v, raw, sel, win, *, rope, rotate_raw, call) -> q
                writes the step's rows into the cache and rotates its queries, before the slots run
                k, v: this step's (cmp, sel, win) rows [B,m,G,D]; raw, sel, win: the (k, v) stores
                they are written to, raw a ring as win's; rope: fp32 (cos, sin) [positions, Dk / 2]
                or None: q, k of sel and win, and with rotate_raw k of cmp, are rotated at their
                positions; tokens past lengths are not written
        gates   (x, weight, bias, *, call) -> gates
                for steps of few tokens
                sigmoid(x weight^T + bias) in fp32, fp64 for fp64 x, as [B,m,Hq,3]; x [B,m,dim],
                weight [3 Hq, dim]
    """

    name: str
    api_version: tuple[int, int]
    slots: Mapping[str, SlotSpec]
    probe: str
    priority: int = 0
    slot_priority: Mapping[str, int] = dataclasses.field(default_factory=dict)
    summary: str = ""
    rank: str | None = None
    fused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # "module:function" of () -> lines of text on this machine, for `nsa backends show`
    detail: str | None = None
    # "module:function" of a torch device type -> the context manager in which nsa_verify judges
    # this backend there, or None where it needs none. For kernels that run in an emulator: they are
    # judged on tiny cases.
    judge_context: str | None = None

    def priority_of(self, slot: str) -> int:
        """Priority of this backend for ``slot``, whatever the request."""
        return self.slot_priority.get(slot, self.priority)


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """What a plugin returns in place of a BackendSpec when the backend ``name`` cannot run here,
    whatever is asked.

    For facts known without torch: kernels not shipped yet, wrong platform, a package missing. What
    depends on the request or the GPU is the probe's to say.
    """

    name: str
    reason: Reason


Registered: TypeAlias = BackendSpec | Unavailable


class Hooks:
    """The hooks nsa_core calls; a plugin implements the one below."""

    @hookspec
    def nsa_register_backends(  # type: ignore[empty-body]
        self, api_version: tuple[int, int]
    ) -> Registered | Sequence[Registered]:
        """Return the plugin's backend, or several. ``api_version`` is nsa_core's; the argument may
        be left out.
        """


def import_named(path: str) -> Any:
    """The object that "module:attribute" names."""
    from importlib import import_module

    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
