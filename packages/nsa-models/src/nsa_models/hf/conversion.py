"""Convert dense Llama, Qwen2 and Qwen3 models of transformers to NSA."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from nsa_core.errors import InvalidInput
from nsa_core.util.atomic_files import check_output_folder, writing
from nsa_models.hf.folder import load_model
from nsa_models.hf.models import MODELS
from nsa_models.lm import config_json, saving
from nsa_models.lm.config import layers_with_nsa
from nsa_models.lm.config_json import DENSE_TYPES, LayerSpec, nsa_fields
from nsa_models.lm.model_folder import ModelFolder, open_folder, plain_file

NSALayers = str | Sequence[int] | Callable[[int], bool] | None
# Fields of NSAConfig unless the caller gives them. A model that trains with them keeps more of its
# far context, because means cannot move the compressed keys away from the keys of the blocks that
# they rank (docs/explanation/learning.md).
DEFAULTS = {"shared_kv": True, "compress": "mean"}
# Fields of a configuration that describe the dense model's class and file.
_NOT_CARRIED = ("model_type", "architectures", "transformers_version", "_name_or_path")


class Conversion(NamedTuple):
    """The result of :func:`convert`.

    Attributes:
        model: The model with NSA.
        carried: Names of the dense model's parameters, all of which were carried over.
        new: Names of the parameters that the dense model did not have: the gates, and phi unless
            it is the mean. They start near dense attention
            (:meth:`nsa_core.NSAttention.start_from_dense`), but the model needs training before
            use.
    """

    model: Any
    carried: list[str]
    new: list[str]


def convert(
    model: Any,
    nsa: Mapping[str, Any] | None = None,
    backends: str | Mapping[str, str] | None = None,
    nsa_layers: NSALayers = None,
) -> Conversion:
    """Convert a dense model to NSA.

    All parameters are carried over. The three branches share the dense key and value projections;
    with ``shared_kv=False`` each gets a copy. Compressed tokens are means of blocks; with another
    ``compress``, phi starts as the mean. The gates of cmp, sel and win start as 0.1, 0.8 and 0.1;
    nothing is random. The dense model is not changed and shares nothing with the
    new one, in which its frozen parameters are frozen too; a joint projection is frozen if all of
    its parts are.

    Args:
        model: A LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM of transformers.
        nsa: Fields of :class:`nsa_core.NSAConfig` such as ``{"window_size": 512}``; default:
            ``shared_kv=True``, ``compress="mean"``, and otherwise those of NSAConfig.
        backends: The backends of the slots, as in :class:`nsa_core.NSAttention`.
        nsa_layers: The layers that get NSA; all others stay dense, parameter for parameter. Layer
            numbers from 0; "all"; "every_4th_dense", which keeps layers 3, 7, 11 and so on dense;
            or a function that returns for a layer number whether the layer gets NSA. Default: all.

    Returns:
        The model with NSA in the dtype and on the device of the dense model, and the names of the
        parameters that were carried over and of the new ones.

    Raises:
        InvalidInput: The model is of another kind, is quantised, has adapters or weights on the
            meta device, or NSA cannot express its attention; a field of ``nsa`` is wrong; or
            ``nsa_layers`` names no layer, or one that the model does not have. The message names
            the field or the parameters.

    Example:
        >>> dense = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        >>> model, carried, new = convert(dense)
        >>> model.save_pretrained("qwen3-nsa")
    """
    model_class = _class_for(model)
    values = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_CARRIED}
    plain_backends = dict(backends) if isinstance(backends, Mapping) else backends
    fields = nsa_fields(nsa)
    config = model_class.config_class.from_dict(
        {**values, "nsa": {**DEFAULTS, **fields}, "nsa_backends": plain_backends}
    )
    numbers = layers_with_nsa(nsa_layers, config.num_hidden_layers)
    config.nsa_layers = None if nsa_layers is None else numbers
    spec = _layer_spec(config.to_dict(), {}, fields)
    dense = dict(model.named_parameters(remove_duplicate=False))
    carried = _with_our_names(dense, spec, numbers)
    converted = model_class._from_config(config, dtype=model.dtype)
    for layer in numbers:
        converted.model.layers[layer].self_attn.start_from_dense()
    converted.generation_config = deepcopy(model.generation_config)
    ours = dict(converted.named_parameters(remove_duplicate=False))
    _check_names(carried, ours)
    with torch.no_grad():
        for name, parameter in ours.items():
            if name in carried:  # a model may have parameters of several dtypes and devices
                parameter.data = carried[name].clone()
                parameter.requires_grad_(carried[name].requires_grad)
        converted.tie_weights()
        _move_new_parameters(converted, ours.keys() - carried.keys(), model)
    converted.train(model.training)
    return Conversion(converted, list(dense), sorted(ours.keys() - carried.keys()))


def _class_for(model: Any) -> Any:
    """Return the class of the model with NSA.

    Raises:
        InvalidInput: The model cannot be converted.
    """
    if not isinstance(model, PreTrainedModel):
        hint = "; merge the adapters first, with model.merge_and_unload()"
        raise InvalidInput(
            f"model must be a causal language model of transformers, got {type(model).__name__}"
            + hint * hasattr(model, "merge_and_unload")
        )
    config_json.check_type(model.config.model_type, DENSE_TYPES)
    if getattr(model.config, "quantization_config", None) is not None:
        raise InvalidInput(
            "quantization_config: a quantised model cannot be converted; load the model in bfloat16"
        )
    model_class = MODELS[model.config.model_type]
    dense_class = model_class.__bases__[1]
    if not isinstance(model, dense_class):
        raise InvalidInput(f"model must be a {dense_class.__name__}, got {type(model).__name__}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InvalidInput(
            "model has weights on the meta device, for example because device_map offloads them:"
            " load it on devices that hold all layers, such as device_map='cpu'"
        )
    return model_class


def _layer_spec(
    values: Mapping[str, Any], own: Mapping[str, Any], nsa: Mapping[str, Any]
) -> LayerSpec:
    """Return the attention layers of a dense model that is converted to NSA.

    Args:
        values: The configuration of the model, as plain values.
        own: The fields of NSAConfig that the model states.
        nsa: The fields of NSAConfig that the caller gives.

    Raises:
        InvalidInput: As :func:`nsa_models.lm.config_json.layer_spec`; the message begins with
            "nsa:" if the model is right without ``nsa``.
    """

    def spec(fields: Mapping[str, Any]) -> LayerSpec:
        return config_json.layer_spec({**values, "nsa": {**DEFAULTS, **fields}})

    try:
        return spec({**own, **nsa})
    except InvalidInput as error:
        spec(own)
        raise InvalidInput(f"nsa: {str(error).removeprefix('config.nsa: ')}") from error


def _with_our_names(
    dense: Mapping[str, torch.Tensor], spec: LayerSpec, layers: Iterable[int]
) -> dict[str, torch.Tensor]:
    """Return the parameters of a dense model as those of the model with NSA in ``layers``.

    A parameter that joins several ones requires grad if one of them does.
    """
    carried = dict(dense)
    copies = 1 if spec.config.shared_kv else 3
    for layer in layers:
        prefix = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            names = [f"{prefix}{name}_proj.{kind}" for name in "qkv"]
            if all(name in carried for name in names):
                q, k, v = (carried.pop(name) for name in names)
                with torch.enable_grad():
                    joint = torch.cat([q, *[k] * copies, *[v] * copies])
                carried[f"{prefix}qkv.{kind}"] = joint
            out = carried.pop(f"{prefix}o_proj.{kind}", None)
            if out is not None:
                carried[f"{prefix}out.{kind}"] = out
    return carried


def _check_names(carried: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> None:
    """Check that the model has every parameter carried over, in its shape."""
    is_new = (".self_attn.phi_k.", ".self_attn.phi_v.", ".self_attn.gate.")
    problems = [f"{name} has no place in the model with NSA" for name in carried.keys() - ours]
    problems += [
        f"{name} is missing"
        for name in ours.keys() - carried.keys()
        if not any(part in name for part in is_new)
    ]
    problems += [
        f"{name} must be {list(ours[name].shape)}, got {list(carried[name].shape)}"
        for name in ours.keys() & carried.keys()
        if ours[name].shape != carried[name].shape
    ]
    if problems:
        raise InvalidInput("the model cannot be carried over: " + "; ".join(sorted(problems)))


def _move_new_parameters(converted: Any, new: set[str], dense: Any) -> None:
    """Move new parameters and buffers to the dtype and device of the layer's other parameters."""
    for name, buffer in dense.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(converted.get_submodule(owner), leaf, buffer.clone())
    for name in new:
        parameter, attention = converted.get_parameter(name), name.split(".self_attn.")[0]
        reference = converted.get_parameter(f"{attention}.self_attn.out.weight")
        parameter.data = parameter.data.to(reference.device, reference.dtype)


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    nsa: Mapping[str, Any] | None = None,
    backends: str | Mapping[str, str] | None = None,
    dtype: str | torch.dtype = "auto",
    nsa_layers: NSALayers = None,
) -> Conversion:
    """Convert the checkpoint of a dense model to NSA and write it with its tokenizer.

    Args:
        source: The folder of a dense model: config.json and safetensors, in one file or sharded; a
            run of `nsa train --attention dense` is one.
        target: The folder of the new model; must be empty or not exist.
        nsa: As in :func:`convert`; fields of a run of `nsa train` stay if it states them.
        backends: As in :func:`convert`.
        dtype: The dtype of the new model; "auto": that of the checkpoint.
        nsa_layers: As in :func:`convert`.

    Returns:
        The result of :func:`convert`, whose model has been written.

    Raises:
        InvalidInput: The folder has no model, the model cannot be converted, the checkpoint lacks a
            parameter or has one that the model lacks, or ``target`` is not empty. The message names
            the fields and the parameters.
    """
    target = Path(target)
    check_output_folder(target)
    folder = open_dense(source)
    fields = fields_for(folder, nsa, nsa_layers)
    conversion = convert(load_model(folder, dtype), fields, backends, nsa_layers)
    write(conversion.model, folder, target)
    return conversion


def open_dense(source: str | Path) -> ModelFolder:
    """Open the folder of a dense model.

    Raises:
        InvalidInput: As :func:`nsa_models.lm.model_folder.open_folder`; or the model has NSA, or
            its tokenizer cannot be read.
    """
    folder = open_folder(source, types=DENSE_TYPES)
    folder.tokenizer()  # it is copied with the model
    return folder


def fields_for(
    folder: ModelFolder, nsa: Mapping[str, Any] | None, nsa_layers: NSALayers
) -> dict[str, Any]:
    """Check what :func:`convert` will make of a dense model, before its weights are read.

    Args:
        folder: The folder of the model.
        nsa: As in :func:`convert`.
        nsa_layers: As in :func:`convert`.

    Returns:
        ``nsa`` with the fields that a dense run of `nsa train` states.

    Raises:
        InvalidInput: ``nsa`` or ``nsa_layers`` does not suit the model.
    """
    own, fields = nsa_fields(folder.values.get("nsa")), nsa_fields(nsa)
    _layer_spec(config_json.complete(folder.values), own, fields)
    layers_with_nsa(nsa_layers, folder.config.n_layers)
    return {**own, **fields}


def write(model: Any, source: ModelFolder, target: Path) -> None:
    """Write a converted model, and copy the tokenizer of the dense one.

    The folder appears when it is complete.

    Args:
        model: The model with NSA.
        source: The folder of the dense model.
        target: The folder to write; empty, or does not exist.

    Raises:
        NotWritten: A file cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        with writing(target):
            model.save_pretrained(partial)
            for name in source.companions:
                shutil.copyfile(plain_file(source.path, name), partial / name)
            saving.seal(partial)
            if target.exists():
                target.rmdir()
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
