"""NSA in Hugging Face transformers: models nsa_llama, nsa_qwen2 and nsa_qwen3, and conversion.

Importing this package registers the models with AutoConfig, AutoModel, AutoModelForCausalLM and
AutoModelForSequenceClassification, and the targets of adapters with peft, if that is installed. It
needs transformers (``pip install 'nsa-models[hf]'``).
"""

from nsa_core.errors import BackendUnavailable
from nsa_core.util.extras import require_module

_OLDEST = (5, 19)
_version = require_module("transformers", "nsa_models.hf needs", "nsa-models[hf]").__version__
if tuple(int(part) for part in _version.split(".")[:2]) < _OLDEST:
    raise BackendUnavailable(
        f"nsa_models.hf needs transformers {_OLDEST[0]}.{_OLDEST[1]} or newer, but {_version} is"
        " installed; pip install 'nsa-models[hf]'"
    )

from nsa_models.hf.attention import NSASelfAttention  # noqa: E402
from nsa_models.hf.cache import NSAModelCache  # noqa: E402
from nsa_models.hf.configs import NSALlamaConfig, NSAQwen2Config, NSAQwen3Config  # noqa: E402
from nsa_models.hf.conversion import Conversion, convert, convert_checkpoint  # noqa: E402
from nsa_models.hf.decoder import NSALlamaModel, NSAQwen2Model, NSAQwen3Model  # noqa: E402
from nsa_models.hf.first_stage import selected_mass, train_new_parameters  # noqa: E402
from nsa_models.hf.models import (  # noqa: E402
    NSALlamaForCausalLM,
    NSALlamaForSequenceClassification,
    NSAQwen2ForCausalLM,
    NSAQwen2ForSequenceClassification,
    NSAQwen3ForCausalLM,
    NSAQwen3ForSequenceClassification,
    register,
)

register()

__all__ = [
    "Conversion",
    "NSALlamaConfig",
    "NSALlamaForCausalLM",
    "NSALlamaForSequenceClassification",
    "NSALlamaModel",
    "NSAModelCache",
    "NSAQwen2Config",
    "NSAQwen2ForCausalLM",
    "NSAQwen2ForSequenceClassification",
    "NSAQwen2Model",
    "NSAQwen3Config",
    "NSAQwen3ForCausalLM",
    "NSAQwen3ForSequenceClassification",
    "NSAQwen3Model",
    "NSASelfAttention",
    "convert",
    "convert_checkpoint",
    "selected_mass",
    "train_new_parameters",
]
