"""Keywords of other attention layers: NSAttention.forward refuses them with the alternative.

Frameworks pass many of these keywords with a value that changes nothing, mostly None. Such values
are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean

_MASK = (
    " is not supported: NSA is causal, and it needs inputs without padding. Remove padding with"
    " rows, cu_seqlens, max_seqlen, indices = nsa_core.unpad(x, attention_mask), pass the first"
    " three, and restore it with nsa_core.pad"
)
_SELF = ": NSA is self-attention only; {name} must be None"
_CACHE = " is not supported: pass cache=, from new_cache() of this layer (docs/how-to/generate.md)"
_POSITIONS = (
    " is not supported: positions are those of the tokens in their sequence, document or cache;"
    " pass cu_seqlens= for packed documents"
)
_WEIGHTS = (
    " is not supported: NSA forms no attention weights; nsa_models.inspect.inspect_model returns"
    " gates and selected blocks"
)
_CAUSAL = " must be True: NSA is causal attention"
_DROPOUT = " must be 0: NSA has no dropout; apply dropout outside the layer"

# keyword -> (text of the error after the keyword, values that change nothing besides None)
_KEYWORDS: dict[str, tuple[str, tuple[object, ...]]] = {
    **dict.fromkeys(("attention_mask", "attn_mask", "key_padding_mask", "mask"), (_MASK, ())),
    **dict.fromkeys(
        ("context", "key_value_states", "encoder_hidden_states", "key", "value"), (_SELF, ())
    ),
    **dict.fromkeys(
        ("past_key_values", "past_key_value", "layer_past", "cache_position"), (_CACHE, ())
    ),
    "use_cache": (_CACHE, (False,)),
    **dict.fromkeys(("position_ids", "position_embeddings"), (_POSITIONS, ())),
    **dict.fromkeys(("need_weights", "output_attentions"), (_WEIGHTS, (False,))),
    **dict.fromkeys(("is_causal", "causal"), (_CAUSAL, (True,))),
    **dict.fromkeys(("dropout", "dropout_p"), (_DROPOUT, (0,))),
}
_OWN = ("x", "cu_seqlens", "max_seqlen", "plan", "cache", "new")


def check_other_keywords(keywords: Mapping[str, Any]) -> None:
    """Check the keywords that are not in the signature of NSAttention.forward.

    Raises:
        InvalidInput: another attention layer knows the keyword, and its value asks for something
            that NSA lacks; the message names every such keyword and the alternative.
        TypeError: a keyword is unknown; the message suggests a similar one.
    """
    errors = []
    for name, value in keywords.items():
        if name not in _KEYWORDS:
            raise TypeError(
                f"NSAttention.forward() got an unexpected keyword argument {name!r}"
                f"{did_you_mean(name, (*_OWN, *_KEYWORDS))}"
            )
        text, neutral = _KEYWORDS[name]
        if value is not None and not (isinstance(value, (bool, int, float)) and value in neutral):
            errors.append(name + text.format(name=name))
    if errors:
        raise InvalidInput("; ".join(errors))
