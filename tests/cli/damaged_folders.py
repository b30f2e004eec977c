"""Damages of a model folder, and what a command says about each."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Folder = pathlib.Path
Damage = Callable[[Folder], object]
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
# Code that writes the file "marker" in the working directory, which no door may run.
MARK = "import pathlib; pathlib.Path('marker').touch()"
HUGE = 10**400


class Pickled:
    """Writes the marker when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (MARK,)


def weights_of(folder: Folder) -> Folder:
    return next(folder.glob("model*.safetensors"))


def edit(name: str, *keys: str, **changes: Any) -> Damage:
    """Return a function that changes fields of a JSON file, inside the fields ``keys``."""

    def damage(folder: Folder) -> None:
        file = folder / name
        values = json.loads(file.read_text()) if file.exists() else {}
        place = values
        for key in keys:
            place = place.setdefault(key, {})
        place.update(changes)
        file.write_text(json.dumps(values))

    return damage


def text(name: str, content: str | bytes) -> Damage:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(content)


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Folder) -> None:
        file = weights_of(folder)
        values = {name: tensor.clone() for name, tensor in load_file(file).items()}
        change(values)
        save_file(values, file)
        if (folder / INDEX).exists():
            edit(INDEX, weight_map=dict.fromkeys(values, file.name))(folder)

    return damage


def bytes_of_weights(change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: weights_of(folder).write_bytes(change(weights_of(folder).read_bytes()))


def sparse(name: str) -> Damage:
    def damage(folder: Folder) -> None:
        with open(folder / name, "wb") as file:
            file.truncate(10**11)

    return damage


def only_a_pickle(folder: Folder) -> None:
    weights_of(folder).unlink()
    (folder / INDEX).unlink(missing_ok=True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled()))


def index_of(weight_map: Any) -> Damage:
    """Return a function that puts an index with this map in place of that of the folder."""

    def damage(folder: Folder) -> None:
        if (folder / WEIGHTS).exists():
            (folder / WEIGHTS).rename(folder / "model-1.safetensors")
        edit(INDEX, weight_map=weight_map)(folder)

    return damage


def program(name: str) -> Damage:
    def damage(folder: Folder) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(MARK)

    return damage


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages] and None


LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
HEADER = json.dumps({"x": {"dtype": "F32", "shape": [10**6], "data_offsets": [0, 4 * 10**6]}})
NAMES_CODE = "names code, and a model folder is read as data"
QUEUE = "model.embed_tokens.weight"
# damage -> (function, words of the sentence; None: the file has no effect and the door opens)
DAMAGES: dict[str, tuple[Damage, str | None]] = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "config is no JSON": (text(CONFIG, "{"), f"{CONFIG} is not JSON"),
    "config is no text": (text(CONFIG, b"\xff\xfe"), f"{CONFIG} cannot be read"),
    "config is deep": (text(CONFIG, "[" * 10**5), f"{CONFIG} is not JSON.*nested"),
    "a field is deep": (
        text(CONFIG, '{"x":' * 200 + "1" + "}" * 200),
        f"{CONFIG} is not JSON.*nested",
    ),
    "config is a list": (text(CONFIG, "[1]"), f"{CONFIG} must be a JSON object"),
    "config is huge": (sparse(CONFIG), f"{CONFIG} is larger than 16 MiB"),
    "huge number": (edit(CONFIG, hidden_size=HUGE), f"{CONFIG} is not JSON.*18 digits"),
    "NaN": (edit(CONFIG, rms_norm_eps=float("nan")), f"{CONFIG} is not JSON.*finite"),
    "unknown type": (edit(CONFIG, model_type="evil"), f"{CONFIG}: model_type must be one of"),
    "type is a list": (edit(CONFIG, model_type=["llama"]), f"{CONFIG}: model_type must be one of"),
    "auto_map": (
        both(edit(CONFIG, auto_map={"AutoConfig": "evil.C"}), program("evil.py")),
        f"{CONFIG}: auto_map {NAMES_CODE}",
    ),
    "kernel": (
        edit(CONFIG, attn_implementation="a/b"),
        f"{CONFIG}: attn_implementation {NAMES_CODE}",
    ),
    "hidden kernel": (
        edit(CONFIG, _attn_implementation={"": "a/b"}),
        f"{CONFIG}: _attn_implementation {NAMES_CODE}",
    ),
    "plain attention": (edit(CONFIG, attn_implementation="flash_attention_2"), None),
    "quantised": (edit(CONFIG, quantization_config={}), f"{CONFIG}: quantization_config must not"),
    "10**9 layers": (edit(CONFIG, num_hidden_layers=10**9), f"{CONFIG}: num_hidden_layers must be"),
    "900 layers": (edit(CONFIG, num_hidden_layers=900), f"{CONFIG}: num_hidden_layers is 900"),
    "10**12 words": (edit(CONFIG, vocab_size=10**12), f"{CONFIG}: vocab_size must be"),
    "10**7 words": (edit(CONFIG, vocab_size=10**7), "embed_tokens.weight must be float"),
    "odd width": (edit(CONFIG, hidden_size=127), "must be float"),
    "odd heads": (edit(CONFIG, head_dim=31), f"{CONFIG}: head_dim must be even"),
    "no sizes": (
        text(CONFIG, '{"model_type": "nsa_llama"}'),
        f"{CONFIG}: hidden_size must be|the model has NSA already",  # convert looks at it first
    ),
    "nsa is a list": (edit(CONFIG, nsa=[1]), f"{CONFIG}: nsa must be"),
    "nsa has a wrong type": (edit(CONFIG, "nsa", window_size="x"), "window_size must be"),
    "nsa has a huge size": (edit(CONFIG, "nsa", compress_block_size=2**30), CONFIG),
    "nsa selects all": (
        edit(CONFIG, "nsa", num_selected_blocks=2**31 - 1),
        f"{CONFIG}: config.nsa: num_selected_blocks must be <= 4,096",
    ),
    "nsa sees all": (
        edit(CONFIG, "nsa", window_size=2**31 - 1),
        f"{CONFIG}: config.nsa: window_size must be <= 1,048,576",
    ),
    "backends are a list": (edit(CONFIG, nsa_backends=["x"]), f"{CONFIG}: nsa_backends must be"),
    "backends of backends": (edit(CONFIG, nsa_backends={"sel": {}}), f"{CONFIG}: nsa_backends"),
    "padding beyond the words": (edit(CONFIG, pad_token_id=9999), f"{CONFIG}: pad_token_id must"),
    "rope of nothing": (edit(CONFIG, "rope_parameters", rope_type="yarn"), f"{CONFIG}: rope_param"),
    "rope divided by 0": (
        edit(CONFIG, rope_parameters={**LLAMA3, "low_freq_factor": 0}),
        f"{CONFIG}: rope_param[^\\n]*: low_freq_factor must be > 0 and below high_freq_factor",
    ),
    "text_config": (edit(CONFIG, text_config={"text_config": "/dev/zero"}), None),
    "weights elsewhere": (edit(CONFIG, transformers_weights="../outside/x.bin"), None),
    "10**9 labels": (edit(CONFIG, num_labels=10**9), None),
    "methods": (edit(CONFIG, to_dict=1, __class__="x", from_pretrained=2), None),
    "index of a number": (index_of({QUEUE: 3}), f"{INDEX}: weight_map must give a file"),
    "index of a list": (index_of([1]), f"{INDEX}: weight_map must give a file"),
    "index out": (index_of({QUEUE: "../outside/w.safetensors"}), f"{INDEX}: weight_map must give"),
    "index at root": (index_of({QUEUE: "/etc/passwd"}), f"{INDEX}: weight_map must give a file"),
    "index of the parent": (index_of({QUEUE: ".."}), "leads out of the folder"),
    "index of nothing": (index_of({QUEUE: "absent.safetensors"}), "absent.safetensors cannot be"),
    "index of a zero": (index_of({QUEUE: "a\0b"}), "cannot be read"),
    "index of half the tensors": (index_of({QUEUE: "model-1.safetensors"}), "safetensors"),
    "two models": (
        both(
            lambda folder: weights_of(folder).rename(folder / "model-1.safetensors"),
            lambda folder: shutil.copy(folder / "model-1.safetensors", folder / WEIGHTS),
            edit(INDEX, weight_map={}),
        ),
        f"has {WEIGHTS} and {INDEX}",
    ),
    "only a pickle": (only_a_pickle, "no saved run|has no model.safetensors"),
    "half of the weights": (bytes_of_weights(lambda b: b[: len(b) // 2]), "cannot be read as safe"),
    "no weights": (bytes_of_weights(lambda b: b""), "cannot be read as safetensors"),
    "a huge header": (
        bytes_of_weights(lambda b: struct.pack("<Q", 2**40) + b[8:]),
        "its header has 1,099,511,627,776 bytes",
    ),
    "a header without data": (
        bytes_of_weights(lambda b: struct.pack("<Q", len(HEADER)) + HEADER.encode()),
        "cannot be read as safetensors",
    ),
    "integers": (tensors(lambda t: t.update({QUEUE: t[QUEUE].int()})), "must be float"),
    "an extra tensor": (tensors(lambda t: t.update(x=torch.ones(1))), "'x' is not a parameter"),
    "an extra buffer": (
        tensors(lambda t: t.update({"x.rotary_emb.inv_freq": torch.ones(1)})),
        "is not a parameter",
    ),
    "a missing tensor": (tensors(lambda t: t.pop("model.norm.weight")), "norm.weight is missing"),
    "another head": (
        tensors(lambda t: t.update({"lm_head.weight": t[QUEUE] + 1})),
        "lm_head.weight differs",
    ),
    "the same head": (tensors(lambda t: t.update({"lm_head.weight": t[QUEUE].clone()})), None),
    "tokenizer is no JSON": (text("tokenizer.json", "{"), "tokenizer.json cannot be read"),
    "tokenizer is huge": (sparse("tokenizer.json"), "tokenizer.json is larger than 64 MiB"),
    "tokenizer without words": (
        edit("tokenizer.json", "model", vocab={}),
        "tokenizer.json has no vocabulary",
    ),
    "tokenizer of other words": (
        edit("tokenizer.json", "model", vocab={f"word{n}": n for n in range(300)}),
        "tokenizer.json has ids up to 300, but the model has a vocabulary of 256",
    ),
    "tokenizer of one word": (
        edit("tokenizer.json", model={"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "!"}),
        "tokenizer.json cannot encode the text",
    ),
    "code of a tokenizer": (
        both(
            edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["t.T", None]}),
            program("t.py"),
        ),
        f"tokenizer_config.json: auto_map {NAMES_CODE}",
    ),
    "class of a tokenizer": (
        both(
            edit("tokenizer_config.json", tokenizer_class="T", tokenizer_file="/etc/passwd"),
            program("tokenization_t.py"),
        ),
        None,
    ),
    "tokens of no text": (edit("tokenizer_config.json", bos_token=[1], eos_token={"a": 1}), None),
    "tokens without a limit": (edit("tokenizer_config.json", model_max_length=10**30), None),
    "generation is no JSON": (text("generation_config.json", "x"), "generation_config.json is not"),
    "generation is a list": (text("generation_config.json", "[]"), "generation_config.json must"),
    "generation of a stranger": (
        edit("generation_config.json", max_length="x", cache_implementation=1, top_k=-1),
        None,
    ),
    "code of generate": (program("custom_generate/generate.py"), None),
    "an adapter": (
        both(
            edit("adapter_config.json", base_model_name_or_path="a/b", peft_type="LORA"),
            lambda folder: (folder / "adapter_model.bin").write_bytes(pickle.dumps(Pickled())),
        ),
        None,
    ),
}
REPLACED = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda file: os.symlink("/dev/zero", file),
    "link out": lambda file: os.symlink("../outside/secret", file),
    "link to nothing": lambda file: os.symlink("nothing", file),
}
FILES = (
    CONFIG,
    INDEX,
    WEIGHTS,
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
