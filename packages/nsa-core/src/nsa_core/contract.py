"""The contract between nsa_core and its backends. This module imports no torch.

It is the only module that a backend author has to read. docs/how-to/write-a-backend.md is the
tutorial, docs/explanation/semantics.md defines the result of each slot.

Registration
------------
A backend is a distribution with an entry point in the group ``nsa.backends``. The entry point names
a module that imports no torch and implements one hook:

    @hookimpl
    def nsa_register_backends() -> BackendSpec: ...

The hook returns an :class:`Unavailable` instead if it finds, without torch, that the backend cannot
run on this machine.

Slots
-----
A backend implements any of five slots, each independently of the others. A slot is a forward
function and, except for `select`, a backward function:

    cmp      forward(q, k_cmp, v_cmp, *, call) -> o, lse
             backward(do, q, k_cmp, v_cmp, o, lse, *, call) -> dq, dk_cmp, dv_cmp
    select   forward(q, k_cmp, lse, *, call) -> blocks
    sel      forward(q, k, v, blocks, *, call) -> o, lse
             backward(do, q, k, v, blocks, o, lse, *, call) -> dq, dk, dv
    win      forward(q, k, v, *, call) -> o, lse
             backward(do, q, k, v, o, lse, *, call) -> dq, dk, dv
    combine  forward(gates, o_cmp, o_sel, o_win, *, call) -> o
             backward(do, gates, o_cmp, o_sel, o_win, *, call) -> dgates, do_cmp, do_sel, do_win

``call`` is a :class:`SlotCall`. Shapes:

    q        [B, S, Hq, Dk]
    k, v     [B, S, G, Dk], [B, S, G, Dv]
    k_cmp    [B, n_c, G, Dk], n_c = num_compressed(S)
    v_cmp    [B, n_c, G, Dv]
    o        [B, S, Hq, Dv]
    lse      [B, Hq, S], natural log, fp32 (fp64 for fp64 q), -inf where no key is visible
    blocks   [B, S, G, n], int32, block indices. `select` returns them in ascending order, padded
             with -1 at the end. `sel` accepts any order, duplicates, -1, future blocks and indices
             out of range, and must not read the last two.
    gates    [B, S, Hq, 3], fp32 (fp64 for fp64 q), in the order cmp, sel, win

Packed calls drop B: tensors are [T, ...] and lse is [Hq, T]. The call carries ``cu_seqlens`` (int32
on the device) and ``max_seqlen`` (a host integer). Block indices are local to the document. k_cmp
and v_cmp have T // d rows. The rows of a document start at the sum of num_compressed() over the
documents before it. The rows after those of the last document are never read, and their gradient is
zero.

Queries inside a sequence
-------------------------
With ``Request.partial``, q may hold only some rows of its sequences, for example a chunk of a long
prompt, or the rows of one rank. A backend that supports this for a slot sets ``SlotSpec.partial``;
others are not asked for such requests. ``call.first_query`` is the position of row 0 of q:

    dense    q [B, S, ..] holds the tokens first_query .. first_query + S - 1 of each sequence.
             k and v have N >= first_query + S rows, k_cmp and v_cmp at least
             num_compressed(first_query + S). No query sees the rows after its own token.
    packed   q [T, ..] holds the rows first_query .. first_query + T - 1 of the packed axis, which
             ``cu_seqlens`` divides into documents and which has cu_seqlens[-1] >= first_query + T
             rows. k and v have cu_seqlens[-1] rows, k_cmp and v_cmp cu_seqlens[-1] // d. The first
             and the last of q's documents may be cut.

blocks and lse have the rows of q, block indices count from the start of the sequence or document.
The results are those of the same rows of the whole call. dk and dv have a row for each given key,
and are the part of the gradient that these queries contribute; 0 for keys that none of them sees.

Decode forms
------------
A slot may also have a decode form, which is forward only. It computes B runs of new queries over
keys in pages. `combine` has no decode form, because its forward serves.

    cmp      decode(q, k_cmp, v_cmp, *, call) -> o, lse
    select   decode(q, k_cmp, lse, *, call) -> blocks
    sel      decode(q, k, v, blocks, *, call) -> o, lse
    win      decode(q, k, v, *, call) -> o, lse

``call`` is a :class:`DecodeCall`. Shapes that differ from the above:

    q        [B, m, Hq, Dk]. Row r of run b is the token starts[b] + r of sequence sequences[b], or
             of sequence b if ``sequences`` is None. Rows from lengths[b] on are padding: their o is
             0, their lse -inf and their blocks -1. m is 1 or a few for decode steps, and thousands
             for a chunk of a long prompt. In a ragged batch m is 1, and several runs belong to one
             sequence.
    k, v     [P, page, G, D] of sel and win. ``tables`` has a block table [sequences, columns] of
             each branch: token t of sequence s is row t % page of the page
             table[s, t // page % columns]. A table that covers the whole sequence never wraps
             around; that of sel does not, and its page is a multiple of l'. That of win may, if
             columns * page >= w + new - 1, where new is the number of tokens that the step adds to
             a sequence: with one column, a page is a ring.
    k_cmp    [P, page, G, D] and v_cmp likewise: compressed token i is row i % page of the page
             table[s, i // page] of the block table of cmp.

The pages already hold the tokens of the current step, of all runs. A decode form must not read
entries of a table past the last token of a run, nor the memory past that token. The replay of a
CUDA graph finds new values in the same ``starts``, ``lengths``, ``sequences`` and ``tables``.

Division of work
----------------
nsa_core wraps the functions of a slot into a torch operator. It provides the schema, shape
inference for torch.compile, autograd, checks of inputs and outputs, and sets the current CUDA
device. It also handles calls without work (no token, no compressed token, `sel` with n = 0 blocks),
so a backend never receives them.

Inputs have stride(-1) == 1; nsa_core copies an input with another layout. Integer metadata
(``blocks``, ``cu_seqlens`` and that of a DecodeCall) is contiguous; rows of a block table may be
apart. nsa_core copies metadata of other strides at every call, inside a captured CUDA graph too, so
that a replay reads new values; a backend must not keep metadata, or results computed from it, for a
later call.
Returned tensors must be new and must not alias an input; nsa_core copies one that is not
contiguous. Operators run below autograd: torch.func.vjp works inside a backward,
torch.autograd.grad does not.

Of nsa_core, a backend imports only this module, layout, packing, fold (compressed attention as
causal attention), flash (operands of FlashAttention), dtypes (page codes) and dryrun (workspaces).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import pluggy

from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.limits import integer_problems

if TYPE_CHECKING:
    import torch

# (major, minor). A plugin for another major version, or for a later minor version, is not loaded.
API_VERSION = (1, 1)
PROJECT = "nsa"
ENTRY_POINT_GROUP = "nsa.backends"
SLOTS = ("cmp", "select", "sel", "win", "combine")
BRANCHES = ("cmp", "sel", "win")
# Calls without an explicit plan use a cached plan, made for the largest of these numbers of tokens
# that their sequences reach. Shorter and packed sequences use a plan for an unknown number.
PLANNED_LENGTHS = (32768, 65536)
PHASES = ("prefill", "decode")
FUSED_DECODE = ("step", "append", "gates", "compress")
FUSED = (*FUSED_DECODE, "backward")
DTYPES = ("bfloat16", "float16", "float32", "float64")
KV_DTYPES = ("float8_e4m3fn", "int8")

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclasses.dataclass(frozen=True)
class Reason:
    """One reason why a backend does not support a request.

    Attributes:
        code: a stable identifier in snake_case, for example "sm_too_old".
        message: a short sentence, for example "needs sm_90, this GPU is sm_80".
        hint: what the user can do, for example "use triton"; may be empty.
    """

    code: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class Rank(NamedTuple):
    """A rank and its reason; a rank function may return one in place of an integer.

    Attributes:
        value: the rank; `auto` takes the backend with the highest one.
        reason: a short sentence that says why, for example "faster than triton on an A100". It is
            shown if the backend is chosen.
    """

    value: int
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request to run one slot: hashable metadata without tensors.

    Attributes:
        slot: one of :data:`SLOTS`.
        geometry: the block sizes.
        n_heads: number of query heads, Hq; a multiple of ``n_kv_heads``.
        n_kv_heads: number of key/value heads, G.
        head_dim: width of a query or key head, Dk.
        v_head_dim: width of a value head, Dv.
        dtype: dtype of q, k and v, one of :data:`DTYPES`.
        device: the torch device type, for example "cpu" or "cuda".
        capability: compute capability of the CUDA device, for example (8, 0); None elsewhere.
        phase: "prefill" or "decode".
        needs_grad: whether the backward runs too.
        deterministic: whether every run must give the same bits.
        varlen: whether the tensors are packed documents.
        partial: whether queries may begin inside a sequence, with more keys than queries.
        batch: number of sequences, or of documents if packed; None if unknown when planning.
        seq_len: tokens per sequence, or total tokens if packed; None if unknown when planning.
        page_size: tokens per page of the cache, for decode; None if each sequence is contiguous.
        kv_dtype: dtype of quantized pages, one of :data:`KV_DTYPES`, for decode; None if pages
            have the dtype of q.

    Raises:
        InvalidInput: a field is invalid; the message names every invalid field and its value.
    """

    slot: str
    geometry: BlockGeometry
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "float32"
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    phase: str = "prefill"
    needs_grad: bool = False
    deterministic: bool = False
    varlen: bool = False
    partial: bool = False
    batch: int | None = None
    seq_len: int | None = None
    page_size: int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        problems = []
        for name, allowed in (("slot", SLOTS), ("phase", PHASES)):
            if getattr(self, name) not in allowed:
                problems.append(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        problems += self._invalid_sizes_and_flags()
        if problems:
            raise InvalidInput("; ".join(problems))
        if self.n_heads % self.n_kv_heads:
            problems.append(
                f"n_heads must be a multiple of n_kv_heads: {self.n_heads} query heads do not"
                f" divide over {self.n_kv_heads} key/value heads"
            )
        if self.phase == "decode" and (self.needs_grad or self.varlen or self.partial):
            problems.append(
                "decode has no gradient, takes no packed documents, and reads positions from the"
                f" cache: needs_grad, varlen and partial must be False, got {self.needs_grad},"
                f" {self.varlen} and {self.partial}"
            )
        if self.page_size is not None and self.page_size % self.geometry.select_block_size:
            size = self.geometry.select_block_size
            problems.append(
                f"page_size must be a multiple of select_block_size {size}, got {self.page_size}"
            )
        if self.kv_dtype is not None and (self.kv_dtype not in KV_DTYPES or self.phase != "decode"):
            problems.append(
                f"kv_dtype must be None or, for decode, one of {', '.join(KV_DTYPES)}, got"
                f" {self.kv_dtype!r} for {self.phase}"
            )
        if self.dtype not in DTYPES:
            problems.append(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if problems:
            raise InvalidInput("; ".join(problems))

    def _invalid_sizes_and_flags(self) -> list[str]:
        """Problems with integer fields and with bool fields; an empty list if all are valid."""
        problems: list[str] = []
        sizes = dict.fromkeys(("n_heads", "n_kv_heads", "head_dim", "v_head_dim", "page_size"), 1)
        for name, minimum in {**sizes, "batch": 0, "seq_len": 0}.items():
            optional = name in ("batch", "seq_len", "page_size")
            problems += integer_problems(name, getattr(self, name), minimum, optional=optional)
        for name in ("needs_grad", "deterministic", "varlen", "partial"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be True or False, got {getattr(self, name)!r}")
        return problems


@dataclasses.dataclass(frozen=True)
class SlotCall:
    """The arguments of a slot's forward and backward besides the tensors.

    Attributes:
        geometry: the block sizes.
        scale: factor of q k^T before the softmax; any finite number, 0 and negative included.
        cu_seqlens: int32 [documents + 1] on the device, contiguous, the first row of each packed
            document and the number of rows T; None if the tensors are not packed.
        max_seqlen: length of the longest sequence or document, or an upper bound of it.
        deterministic: whether every run must give the same bits.
        first_query: position of row 0 of q in its sequences, or in the packed axis; not 0 only if
            the request is partial.
    """

    geometry: BlockGeometry
    scale: float
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int = 0
    deterministic: bool = False
    first_query: int = 0


class BlockTables(NamedTuple):
    """The block table of each branch, int32 [sequences, columns] on the device.

    An entry of a call that does not read the branch may be any table.

    Attributes:
        cmp: pages of compressed tokens.
        sel: pages of all tokens.
        win: pages of the newest tokens.
        raw: pages of the newest inputs of phi.
    """

    cmp: torch.Tensor
    sel: torch.Tensor
    win: torch.Tensor
    raw: torch.Tensor


class PageScales(NamedTuple):
    """The scales of quantized pages, float32 [P, G, 2] on the device, of keys and of values.

    The last two axes are contiguous. A stored number c of a page and kv head is c * scale; x is
    stored as round(x / scale) in float32, to nearest, ties to even, at most 448 (float8_e4m3fn) or
    127 (int8) in magnitude. x is rounded to the dtype of q first. NaN is stored as 0; the output of
    its own token is still NaN if its query is.
    """

    cmp: torch.Tensor
    sel: torch.Tensor
    win: torch.Tensor


# Name of an attribute of the tensors of a cache, whose metadata never change: (shape, strides,
# dtype). Reading it takes a tenth of the time of reading all three.
KNOWN_METADATA = "nsa_metadata"


@dataclasses.dataclass(frozen=True)
class DecodeCall:
    """The arguments of a slot's decode form besides the tensors.

    Attributes:
        geometry: the block sizes.
        scale: factor of q k^T before the softmax.
        starts: int32 [B] on the device, position of the first token of each run. A backend gets
            this tensor, ``lengths``, ``sequences`` and the rows of the tables contiguous.
        lengths: int32 [B] on the device, one past the position of the last token of each run;
            starts <= lengths <= starts + m.
        tables: the block tables.
        max_len: host integer, an upper bound of ``lengths``, for grid sizes.
        sequences: int32 [B] on the device, the row of the tables of each run; None if run b has
            row b.
        scales: the scales of the pages of cmp, sel and win if they are quantized, otherwise None.
            The pages of raw have the dtype of q.
    """

    geometry: BlockGeometry
    scale: float
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: BlockTables
    max_len: int
    sequences: torch.Tensor | None = None
    scales: PageScales | None = None

    @functools.cached_property
    def is_contiguous(self) -> bool:
        """Whether the tensors and the rows of the tables are contiguous."""
        tensors = (self.starts, self.lengths, *self.tables, self.sequences)
        return all(x is None or x.is_contiguous() or x.stride(-1) == 1 for x in tensors)

    def table(self, branch: str) -> torch.Tensor:
        """Return the block table of ``branch`` with one row per run, [B, columns].

        It is a copy if ``sequences`` is given, whose values nobody may have checked.
        """
        table: torch.Tensor = getattr(self.tables, branch)
        if self.sequences is None:
            return table
        return table.index_select(0, self.sequences.clamp(0, len(table) - 1))


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """One slot of a backend.

    Functions are named as "module:function" and imported when a plan first uses them.

    Attributes:
        forward: the forward function.
        backward: the backward function; None if the slot is forward only.
        decode: the decode form; None if the slot supports prefill only.
        evidence: substrings of profiler event names, one of which the profile of each call
            contains; () if not stated.
        workspace: a function Request -> int, the peak bytes that forward (and backward, with
            ``needs_grad``) allocate beyond their inputs; None if not stated.
        decode_workspace: the same for the decode form.
        deterministic: whether forward and backward give the same bits for the same input even
            without a request for determinism.
        reads_boundaries: whether packed calls read ``cu_seqlens`` on the host, with
            :func:`nsa_core.packing.host_boundaries`. Such calls cannot be captured in a CUDA graph.
        warmup_tokens: number of tokens of a call that reaches every kernel of the slot. If it is
            more than the default, warm-up also runs a call of a few tokens.
            Plan.warmup() runs such a call.
        partial: whether forward and backward take queries that begin inside a sequence.
        quantized: whether the decode form, and the fused forms of the backend, take quantized
            pages, see :class:`PageScales`.
        reads_lse: whether the backward computes the probabilities as exp(s - lse) from any ``lse``
            that it gets, and 0 from one of +inf. It can then join the fused backward of another
            backend, which passes lse - ln(gate) to scale a branch by its gate.
    """

    forward: str
    backward: str | None = None
    decode: str | None = None
    evidence: tuple[str, ...] = ()
    workspace: str | None = None
    decode_workspace: str | None = None
    deterministic: bool = True
    reads_boundaries: bool = False
    warmup_tokens: int = 128
    partial: bool = False
    quantized: bool = False
    reads_lse: bool = False


@dataclasses.dataclass(frozen=True)
class BackendSpec:
    """A backend: the slots that it implements, and a probe that states what it supports.

    Functions are named as "module:function", as in :class:`SlotSpec`.

    Attributes:
        name: the backend's name, which users pass as ``backends=``.
        api_version: the :data:`API_VERSION` that the backend is written for.
        slots: slot name to :class:`SlotSpec`.
        probe: a function Request -> Sequence[Reason] that returns ALL reasons against the request;
            an empty sequence means support. It must be cheap and have no side effects. It is called
            only for slots in ``slots``.
        priority: rank among the backends that support a request; `auto` takes the highest.
        slot_priority: priorities of single slots, which override ``priority``.
        summary: one line about the backend, for tables.
        rank: a function Request -> int or :class:`Rank`, as cheap as the probe, whose result
            overrides the priorities. It is called only for requests that the probe accepts.
        fused: name of a fused form to its function, see below.
        fused_workspace: name of a form in ``fused`` to a function Request -> int, the peak bytes
            that the form allocates beyond its inputs; a form without an entry states none. The
            fused backward counts ``outputs`` until it frees them.
        detail: a function () -> list of lines about this machine, for `nsa backends show`.
        judge_context: a function of a torch device type that returns the context manager in which
            nsa_verify judges this backend, or None if it needs none. It serves kernels that run in
            an emulator; verification then uses tiny cases.

    Fused decode forms are used if one backend runs every slot of a decode plan:

        step     (q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, *, call) -> o, blocks
                 Computes all five slots.
        append   (q, k, v, raw, sel, win, *, rope, rotate_raw, call) -> q
                 Writes the rows of the step into the cache and returns the rotated queries. It runs
                 before the slots. Rows past ``lengths`` are not written.
                 k, v           rows of this step for (cmp, sel, win), each [B, m, G, D]
                 raw, sel, win  the (k, v) pages to write to, of any strides but that of the last
                                axis; raw, phi's input, may wrap around like win. Those of sel and
                                win are quantized if call.scales are given.
                 rope           fp32 (cos, sin), each [positions, Dk / 2], or None. q and the k of
                                sel and win are rotated at their positions.
                 rotate_raw     whether the k of cmp is rotated too
        gates    (x, weight, bias, *, call) -> gates
                 Computes sigmoid(x weight^T + bias) in fp32 (fp64 for fp64 x) as [B, m, Hq, 3], for
                 steps of few tokens. x [B, m, dim], weight [3 Hq, dim], bias [3 Hq].
        compress (k, v, k_cmp, v_cmp, phi_k, phi_v, *, rope, call) -> None
                 Compresses the block that a step of at most d rows completes. It runs after append.
                 Block i of run b, i = num_compressed(starts[b]), is complete if
                 i d + l <= lengths[b]; then compressed token i is written. Nothing else is written.
                 k, v           the pages raw of append, with columns * page >= l + new - 1, where
                                new is the number of tokens that the step adds to a sequence
                 k_cmp, v_cmp   the pages to write to, as the decode form of cmp reads them, and
                                quantized if call.scales are given
                 phi_k, phi_v   parameters of W flatten(block + position) + b: position [l, D],
                                weight [out, l D] and bias [out]. Those of an MLP, whose ``out`` is
                                the number of its hidden units, are followed by the weight
                                [D, hidden] and the bias [D] after its exact GELU. They have the
                                dtype of k, or fp32 beside a 16-bit k; a weight may then be rounded
                                to the dtype of k. Both are empty if phi is the mean of the block.
                 rope           as in append, or None. The compressed key is rotated at position
                                i d.
                 It is called for phis of kind mean, mlp and linear without hooks; k_cmp of other
                 phis is computed by nsa_core.

    The fused backward is used if one backend runs every slot of a prefill plan, every input needs a
    gradient, and the caller states that no gate is negative. Another backend may run cmp if its
    SlotSpec has ``reads_lse``:

        backward (do, q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, blocks, lse_cmp, lse_sel,
                 lse_win, *, outputs, call, cmp_backward=None)
                 -> dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates
                 Computes what the backwards of combine, cmp, sel and win do together; dq is the sum
                 over the branches. ``do`` is the gradient of the gated sum and may have any strides
                 but that of its last axis. ``outputs`` is the list [o_cmp, o_sel, o_win]; clear()
                 frees their memory after their last use. A gate may be 0, or above 1. It is not
                 called without
                 queries, compressed tokens or blocks, nor for queries inside a sequence.
                 ``cmp_backward`` is given if another backend runs cmp: the function (do, q, k_cmp,
                 v_cmp, o_cmp, lse) -> dq, dk_cmp, dv_cmp, its backward, to use for this branch.
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
    detail: str | None = None
    judge_context: str | None = None
    fused_workspace: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def priority_of(self, slot: str) -> int:
        """Return the priority for ``slot``, without the effect of ``rank``."""
        return self.slot_priority.get(slot, self.priority)


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """A backend that cannot run on this machine, whatever the request.

    A plugin returns it instead of a BackendSpec for facts that need no torch: a missing package,
    the wrong platform, kernels that are not shipped yet. Reasons that depend on the request or on
    the GPU belong in the probe.

    Attributes:
        name: the backend's name.
        reason: why it cannot run.
    """

    name: str
    reason: Reason


Registered: TypeAlias = BackendSpec | Unavailable


class Hooks:
    """The hook that nsa_core calls and a plugin implements."""

    @hookspec
    def nsa_register_backends(  # type: ignore[empty-body]
        self, api_version: tuple[int, int]
    ) -> Registered | Sequence[Registered]:
        """Return the backend, or the backends, of the plugin.

        Args:
            api_version: the :data:`API_VERSION` of nsa_core. An implementation may leave the
                parameter out.
        """


def import_named(path: str) -> Any:
    """Import and return the object named by ``path``, "module:attribute"."""
    from importlib import import_module

    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
