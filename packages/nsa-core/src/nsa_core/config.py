"""NSAConfig: the configuration of one NSA layer, validated on construction."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Collection
from typing import Any, TypeVar

from nsa_core import hugging_face
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.limits import integer_problems, shown
from nsa_core.util.text import did_you_mean

Class = TypeVar("Class", bound=type)

COMPRESS_KINDS = ("mlp", "linear", "conv", "mean", "attn_pool")
GATE_KINDS = ("linear", "mlp")


def is_finite(value: object) -> bool:
    """Return whether ``value`` is a real number, of Python or numpy, and finite as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_config(config: object) -> None:
    """Check that ``config`` is an NSAConfig.

    Raises:
        InvalidInput: it is not; the message names its type.
    """
    if not isinstance(config, NSAConfig):
        hint = "; pass NSAConfig(**config) instead of a dict" * isinstance(config, dict)
        raise InvalidInput(f"config must be an NSAConfig, got {type(config).__name__}{hint}")


# Names of the same fields in Hugging Face configurations and in other attention libraries.
_OTHER_NAMES = hugging_face.FIELDS | {
    "d_model": "dim",
    "embed_dim": "dim",
    "heads": "n_heads",
    "num_heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "num_kv_heads": "n_kv_heads",
    "dim_head": "head_dim",
    "block_size": "select_block_size",
    "selection_block_size": "select_block_size",
    "compress_block_sliding_stride": "compress_stride",
    "sliding_window": "window_size",
    "sliding_window_size": "window_size",
    "softmax_scale": "scale",
    "sm_scale": "scale",
}


def _refuses_unknown_fields(cls: Class) -> Class:
    """Make the constructor of a dataclass name the right field for an unknown keyword."""
    init = cls.__init__  # type: ignore[misc]
    known = [f.name for f in dataclasses.fields(cls)]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **fields: Any) -> None:
        unknown = [name for name in fields if name not in known]
        if unknown:
            right = [
                f"; pass {_OTHER_NAMES[name]}= instead of {name}="
                if name in _OTHER_NAMES
                else did_you_mean(name, known)
                for name in unknown
            ]
            from_hf = (
                f". {cls.__name__}.from_hf(hf_config) reads a whole Hugging Face configuration"
                * any(name in hugging_face.FIELDS for name in unknown)
            )
            raise TypeError(
                f"{cls.__name__} has no field {', '.join(map(repr, unknown))}{''.join(right)}"
                f"{from_hf}"
            )
        init(self, *args, **fields)

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


@_refuses_unknown_fields
@dataclasses.dataclass(frozen=True)
class NSAConfig:
    """Shapes and options of one NSA layer (arXiv 2502.11089; symbols l, d, l', n, w of section 3).

    A config is immutable and hashable. ``head_dim`` and ``v_head_dim`` are resolved on
    construction, so a config with defaults equals one with explicit widths. ``dataclasses.replace``
    therefore keeps both widths if ``dim`` or ``n_heads`` changes; pass ``head_dim=None,
    v_head_dim=None`` to derive them again.

    Args:
        dim: width of the layer's input and output.
        n_heads: number of query heads, Hq; a multiple of ``n_kv_heads``.
        n_kv_heads: number of key/value heads, G. The Hq / G query heads of a group share their
            selected blocks.
        head_dim: width of a query or key head, Dk; default dim / n_heads. It must be even with
            ``rope``.
        v_head_dim: width of a value head, Dv; default ``head_dim``.
        compress_block_size: l, tokens per compression block.
        compress_stride: d, tokens between the starts of two compression blocks; divides l and l'.
        select_block_size: l', tokens per selection block; at least l.
        num_selected_blocks: n, blocks selected per token and kv head, forced blocks included; at
            least ``init_blocks + local_blocks``.
        init_blocks: number of blocks at the start of the document that are always selected.
        local_blocks: number of blocks up to the current one that are always selected.
        window_size: w, keys of the sliding window, the token itself included.
        compress: the compression phi of Eq. 7: "mlp", "linear", "conv", "mean" or "attn_pool".
        gate: the map from the layer's input to the gate logits: "linear" or "mlp".
        rope: whether q and k are rotated (rotary embedding on half-split pairs).
        rope_base: base of the rotary frequencies.
        rope_frequencies: the head_dim / 2 rotary frequencies in radians per token, for scaled
            rotary embeddings such as those of Llama 3 and YaRN; default: powers of ``rope_base``.
        rope_before_compress: rotate k before phi. By default phi takes unrotated k, and k_cmp[i] is
            rotated at position i * d.
        qk_norm: apply RMS norms to the heads of q and k.
        shared_kv: one key/value pair for all branches, not one pair per branch.
        scale: factor of q k^T before the softmax; default 1 / sqrt(head_dim). Any finite number is
            allowed, 0 and negative included.
        dropout: must be 0, because NSA has no dropout. It exists for a clear error.
        causal: must be True, because NSA is causal. It exists for a clear error.

    Raises:
        InvalidInput: a field is invalid; the message names every invalid field and its value.

    Example:
        >>> config = NSAConfig(dim=768, n_heads=12, n_kv_heads=2)
        >>> config.head_dim, config.window_size
        (64, 512)
    """

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int | None = None
    v_head_dim: int | None = None
    compress_block_size: int = 32
    compress_stride: int = 16
    select_block_size: int = 64
    num_selected_blocks: int = 16
    init_blocks: int = 1
    local_blocks: int = 2
    window_size: int = 512
    compress: str = "mlp"
    gate: str = "linear"
    rope: bool = True
    rope_base: float = 10000.0
    rope_frequencies: tuple[float, ...] | None = None
    rope_before_compress: bool = False
    qk_norm: bool = False
    shared_kv: bool = False
    scale: float | None = None
    dropout: float = 0.0
    causal: bool = True

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name in ("dim", "n_heads", "n_kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if name in ("head_dim", "v_head_dim") and value is None:
                continue
            problems += integer_problems(name, value)
        for name in ("rope", "rope_before_compress", "qk_norm", "shared_kv", "causal"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be True or False, got {getattr(self, name)!r}")
        try:
            blocks = {f.name: getattr(self, f.name) for f in dataclasses.fields(BlockGeometry)}
            # Built once here, because torch.compile cannot trace the construction.
            object.__setattr__(self, "_geometry", BlockGeometry(**blocks))
        except InvalidInput as error:
            problems.append(str(error))
        if problems:
            raise InvalidInput("; ".join(problems))
        if self.head_dim is None:
            if self.dim % self.n_heads:
                problems.append(
                    f"dim must be a multiple of n_heads, got {self.dim} and {self.n_heads}; or pass"
                    " head_dim"
                )
            object.__setattr__(self, "head_dim", max(1, self.dim // self.n_heads))
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        problems += self._option_problems()
        if problems:
            raise InvalidInput("; ".join(problems))
        object.__setattr__(
            self, "_values", tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        )

    def _option_problems(self) -> list[str]:
        """Problems with fields other than the sizes, and between sizes."""
        problems = []
        if self.n_heads % self.n_kv_heads:
            problems.append(
                f"n_heads must be a multiple of n_kv_heads: {self.n_heads} query heads do not"
                f" divide over {self.n_kv_heads} key/value heads"
            )
        if self.compress not in COMPRESS_KINDS:
            problems.append(
                f"compress must be one of {', '.join(COMPRESS_KINDS)}, got {self.compress!r}"
            )
        if self.gate not in GATE_KINDS:
            problems.append(f"gate must be one of {', '.join(GATE_KINDS)}, got {self.gate!r}")
        if self.rope and self.qk_dim % 2:
            problems.append(
                f"head_dim must be even for rotary embedding, got {self.head_dim}; or set"
                " rope=False"
            )
        if not (is_finite(self.rope_base) and self.rope_base > 0):
            problems.append(f"rope_base must be a finite number > 0, got {shown(self.rope_base)}")
        if (frequencies := self.rope_frequencies) is not None and not (
            isinstance(frequencies, tuple)
            and len(frequencies) == self.qk_dim // 2
            and all(is_finite(frequency) for frequency in frequencies)
        ):
            problems.append(
                f"rope_frequencies must be a tuple of head_dim / 2 = {self.qk_dim // 2} finite"
                f" numbers, got {frequencies!r:.80}"
            )
        if self.scale is not None and not is_finite(self.scale):
            problems.append(f"scale must be finite (a number) or None, got {shown(self.scale)}")
        if not (is_finite(self.dropout) and self.dropout == 0):
            problems.append(
                f"dropout is not part of NSA, got dropout={shown(self.dropout)}; apply dropout"
                " outside the layer"
            )
        if not self.causal:
            problems.append("causal must be True, got False: NSA is causal attention")
        return problems

    @classmethod
    def from_hf(
        cls, hf_config: object, *, ignore: Collection[str] = (), **overrides: Any
    ) -> NSAConfig:
        """Build the config of an NSA layer for a Hugging Face model.

        The layer has the shapes of the model's attention. Block sizes and the other fields keep
        their defaults; ``overrides`` sets them.

        Read:

            hidden_size              dim
            num_attention_heads      n_heads
            num_key_value_heads      n_kv_heads; n_heads if absent or null. num_kv_heads or 1 for
                                     model_type falcon
            head_dim                 head_dim; dim / n_heads if absent or null
            rope_theta               rope_base; that of rope_parameters counts first
            rope_scaling,            rope_frequencies of rope_type linear, llama3, yarn and
            rope_parameters          proportional, and the factor of yarn in scale; an override of
                                     rope_frequencies or scale replaces that factor too
            query_pre_attn_scalar    scale = its power -1/2 (Gemma)
            attention_multiplier     scale (Granite)
            model_type               qk_norm=True for qwen3, qwen3_moe, qwen3_vl_text, gemma3_text,
                                     apertus, dots1, exaone4, hy_v3 and lfm2

        Refused, because the mathematics of NSA would differ, unless named in ``ignore``:

            rope_scaling, rope_parameters    of another rope_type, whose frequencies depend on the
                                             length or the layer; allowed with rope_frequencies
            rope_local_base_freq, partial_rotary_factor, rotary_pct, rotary_dim,
            rope_interleaved, rope_interleave,
            no_rope_layers                   other rotary embeddings; allowed with rope=False, and
                                             partial_rotary_factor with rope_type proportional
            rotary_embedding                 if no name contains "rope" or "rotary" (Jamba, BERT);
                                             allowed with rope=False, without a model_type, and for
                                             llama, qwen2, qwen3 and falcon
            attention_kind                   implied by diffllama, doge, bitnet, jetmoe, zamba2 and
                                             other types whose attention is of another kind
            llama_4_scaling_beta             of rope_parameters (Ministral 3)
            key_multiplier                   other than 1 (Falcon H1)
            sliding_window                   unless use_sliding_window is false
            attention_chunk_size             local attention
            layer_types                      with layers that are not softmax attention
            attention_bias, qkv_bias,
            use_qkv_bias, use_bias,
            enable_bias                      also implied by model_type qwen2, and bert and its kin
            attn_logit_softcapping           caps on the scores
            attention_dropout                other than 0
            attention_sinks                  implied by model_type gpt_oss
            clip_qkv, alibi, kv_lora_rank    other attention
            use_qk_norm, qk_layernorm,
            qk_norm_type                     norms of another kind; allowed with qk_norm=True.
                                             model_type olmo2, olmo3, olmoe, flex_olmo and
                                             minimax_m2 imply qk_norm over all heads, and
                                             hunyuan_v1_dense and nanochat after rotary embedding

        Everything else is ignored: vocab_size, hidden_act, intermediate_size,
        num_hidden_layers, max_position_embeddings (NSA has no maximum length), rms_norm_eps,
        final_logit_softcapping. Properties that only the code of a model states are known for the
        model types named above, and for cohere, ernie4_5, glm and helium, whose rotary pairs are
        neighbours.

        Args:
            hf_config: a transformers configuration (any object with ``to_dict()``), a mapping with
                its names and values, or the path of a config.json or of the folder that holds it.
                A configuration with a ``text_config`` and no heads of its own stands for that.
            ignore: names from the second list that are dropped.
            **overrides: fields of NSAConfig, which replace those read.

        Raises:
            InvalidInput: a size is missing, the attention is refused, or a field is invalid. The
                message names all refused properties and the ``ignore`` that drops them.
            TypeError: an override is not a field of NSAConfig.

        Example:
            >>> llama = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
            >>> config = NSAConfig.from_hf(llama, window_size=1024)
            >>> config.n_kv_heads, config.head_dim, config.window_size
            (8, 128, 1024)
        """
        return cls(**hugging_face.read_fields(hf_config, ignore, overrides))

    @property
    def geometry(self) -> BlockGeometry:
        """The block sizes alone."""
        geometry: BlockGeometry = vars(self)["_geometry"]
        return geometry

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of all fields in order: NSAConfig(*config.values) == config."""
        values: tuple[Any, ...] = self._values  # type: ignore[attr-defined]  # set in __post_init__
        return values

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head, Dk."""
        assert self.head_dim is not None  # set in __post_init__
        return self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of a value head, Dv."""
        assert self.v_head_dim is not None  # set in __post_init__
        return self.v_head_dim

    @property
    def frequencies(self) -> float | tuple[float, ...]:
        """``rope_frequencies``, or ``rope_base`` if they are None."""
        return self.rope_base if self.rope_frequencies is None else self.rope_frequencies

    @property
    def softmax_scale(self) -> float:
        """The softmax scale: ``scale``, or 1 / sqrt(Dk) if it is None."""
        return self.qk_dim**-0.5 if self.scale is None else float(self.scale)
