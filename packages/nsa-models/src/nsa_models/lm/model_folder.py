"""A model folder: config.json, weights and tokenizer, as transformers reads and writes them.

`nsa train`, `nsa convert`, `nsa generate`, `nsa inspect` and ``from_pretrained`` share it. A run of
`nsa train` has the optimizer and its position beside the weights.

A save writes files under new names, and replaces ``model.safetensors.index.json`` last. This index
says which file has which tensor, and has the step, and the size and digest of every file. So a kill
at any moment leaves the old state or the new one. A folder may come from a stranger: it is read as
data, without links out of it, and is checked before anything is allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from nsa_core.errors import InvalidInput
from nsa_core.limits import shown
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error
from nsa_models.lm import config_json, json_fields, weights
from nsa_models.lm.config import LMConfig
from nsa_models.lm.fingerprint import Fingerprint
from nsa_models.lm.head_shards import HeadShards
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import CONFIG, INDEX, OPTIMIZER, check_model
from nsa_models.lm.task import DataSpec
from nsa_models.lm.tokens import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
)

WEIGHTS = "model.safetensors"  # of a model in one file
MOMENTS = ("exp_avg", "exp_avg_sq")
FORMAT = 1
# Files that belong to a model beside its weights, and that a new folder of this model gets.
_TEXTS = (
    *("generation_config.json", TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
_LICENSES = tuple(name + end for name in ("LICENSE", "NOTICE") for end in ("", ".txt", ".md"))
_MAX_JSON, _MAX_FILE = 1 << 24, 1 << 26  # bytes of config.json or an index, and of a companion
_MAX_HEADER = 1 << 24  # bytes of a safetensors header; 100 thousand tensors have less
_DIGITS = 40  # of an integer in a companion: transformers writes 10**30 for "no limit"
# Names of dtypes in safetensors.
_FLOATS = ("F64", "F32", "F16", "BF16")
# In old checkpoints of Llama; transformers ignores it too.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_RANDOM = re.compile(r"random\.(cpu|cuda)\.\d+")
Read = Callable[[str], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Training:
    """The state of a run of `nsa train`, apart from its tensors.

    Attributes:
        step: Number of complete steps.
        tokens: Number of tokens trained on.
        recipe: The training options.
        data: The description of the data.
        corpus: The fingerprint of the data.
        position: The position of each lane of the data.
        tokenizer: "bytes", "file" for tokenizer.json, or None for a task without text.
        processes: Number of processes that saved the state.

    Raises:
        InvalidInput: A field is out of range; the message names every such field.
    """

    step: int
    tokens: int
    recipe: Recipe
    data: DataSpec
    corpus: Fingerprint
    position: list[dict[str, int]]
    tokenizer: str | None
    processes: int

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be >= {least}, got {getattr(self, name)}"
            for name, least in (("step", 0), ("tokens", 0), ("processes", 1))
            if getattr(self, name) < least
        ]
        if any(value < 0 for lane in self.position for value in lane.values()):
            problems.append("position must have numbers >= 0")
        if self.tokenizer not in ("bytes", "file", None):
            problems.append(f"tokenizer must be bytes, file or null, got {self.tokenizer!r:.60}")
        if len(self.position) != self.recipe.batch:
            problems.append(
                f"position has {len(self.position)} lanes, but a step has {self.recipe.batch} rows"
            )
        if problems:
            raise InvalidInput("; ".join(problems))


@dataclasses.dataclass(frozen=True)
class _Own:
    """The entry of this library in an index.

    Attributes:
        format: The version of the format.
        files: Size and digest of each file.
        training: The state of a run; None for another model.
        digest: The digest of the index without this field.
    """

    format: int
    files: dict[str, dict[str, Any]]
    training: Training | None
    digest: str


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model folder whose files are checked; tensors stay on the disk until they are needed.

    Attributes:
        path: The folder.
        values: The fields of config.json that are read.
        config: The sizes of the model.
        files: The file of each tensor of the model.
        companions: Names of the other files of the model, which a copy of the folder needs.
        training: The state of a run; None for another model.
    """

    path: Path
    values: dict[str, Any]
    config: LMConfig
    files: dict[str, str]
    companions: list[str]
    training: Training | None
    _optimizer_files: dict[str, str] = dataclasses.field(default_factory=dict)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None if the folder has none.

        Raises:
            InvalidInput: It cannot be read, or has ids beyond the vocabulary of the model.
        """
        kind = "file" if self.training is None else self.training.tokenizer
        if kind == "bytes":
            return ByteTokenizer()
        return None if kind is None else self.file_tokenizer()

    def file_tokenizer(self) -> FileTokenizer | None:
        """Return the tokenizer.json; None if the folder has none.

        Raises:
            InvalidInput: As :meth:`tokenizer`.
        """
        if TOKENIZER not in self.companions:
            return None
        file = self.path / TOKENIZER
        ends = self.values.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        end = next((number for number in ends if type(number) is int), None)
        tokenizer = FileTokenizer(_text_of(self.path, TOKENIZER, _MAX_FILE), str(file), end)
        if tokenizer.ids > self.config.vocab_size:
            raise InvalidInput(
                f"{file} has ids up to {tokenizer.ids - 1:,}, but the model has a vocabulary of"
                f" {self.config.vocab_size:,}: put back the tokenizer of this model"
            )
        return tokenizer

    def companion(self, name: str) -> dict[str, Any]:
        """Return the JSON object of another file of the model; empty if the folder has none."""
        return read_json(self.path, name, _DIGITS) if name in self.companions else {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model under their names in the folder."""
        with self._reader(self.files) as read:
            return {name: read(name) for name in self.files}

    def texts(self) -> dict[str, str]:
        """Return the texts of config.json and of the other files, as they are on the disk."""
        return {CONFIG: _text_of(self.path, CONFIG, _MAX_JSON), **self.tokenizer_texts()}

    def tokenizer_texts(self) -> dict[str, str]:
        """Return the texts of the tokenizer's files, and of the other texts of the model."""
        names = [name for name in self.companions if name in _TEXTS]
        return {name: _text_of(self.path, name, _MAX_FILE) for name in names}

    def model(self, backends: str | Mapping[str, str] | None = None) -> LanguageModel:
        """Build the model in float32 on the CPU, with the weights of the folder.

        Args:
            backends: As in :class:`nsa_core.NSAttention`.
        """
        model = LanguageModel(self.config, backends)
        self.load_weights(model)
        return model

    @torch.no_grad()
    def load_weights(self, model: LanguageModel, heads: HeadShards | None = None) -> None:
        """Fill a model, tensor by tensor; each rank keeps its own part.

        Args:
            model: A model of these sizes.
            heads: The parameters that tensor parallelism divides; None without it.
        """
        targets: dict[str, torch.Tensor] = dict(model.named_parameters())
        with self._reader(self.files) as read:
            _fill(targets, lambda name: weights.join(name, self.config, read), heads)

    @torch.no_grad()
    def load_optimizer(
        self, model: LanguageModel, optimizer: torch.optim.Optimizer, heads: HeadShards | None
    ) -> None:
        """Restore the moments of a run's optimizer; each rank keeps its own part."""
        assert self.training is not None  # a run
        fused = any(group.get("fused") for group in optimizer.param_groups)
        parameters = dict(model.named_parameters())
        with self._reader(self._optimizer_files) as read:
            for moment in MOMENTS:
                targets = {
                    name: torch.zeros_like(parameter, requires_grad=False)
                    for name, parameter in parameters.items()
                    if f"{moment}.{name}" in self._optimizer_files
                }

                def read_moment(name: str, moment: str = moment) -> torch.Tensor:
                    return read(f"{moment}.{name}")

                _fill(targets, read_moment, heads)
                for name, tensor in targets.items():
                    optimizer.state[parameters[name]][moment] = tensor
        for name, parameter in parameters.items():
            if f"{MOMENTS[0]}.{name}" in self._optimizer_files:
                device = parameter.device if fused else "cpu"
                step = torch.tensor(float(self.training.step), device=device)
                optimizer.state[parameter]["step"] = step

    def load_random_state(self, rank: int, size: int) -> None:
        """Restore PyTorch's random states of a process, or of the first one of another number."""
        assert self.training is not None  # a run
        rank = rank if size == self.training.processes else 0
        with self._reader(self._optimizer_files) as read:
            try:
                torch.set_rng_state(read(f"random.cpu.{rank}"))
                if f"random.cuda.{rank}" in self._optimizer_files and torch.cuda.is_available():
                    torch.cuda.set_rng_state(read(f"random.cuda.{rank}"))
            except (RuntimeError, TypeError) as error:
                raise InvalidInput(
                    f"{self.path}: the random state cannot be restored: {describe_error(error)}"
                ) from error

    @contextlib.contextmanager
    def _reader(self, files: Mapping[str, str]) -> Iterator[Read]:
        """Yield a function that reads one tensor by its name."""
        with contextlib.ExitStack() as stack:
            opened: dict[str, Any] = {}

            def read(name: str) -> torch.Tensor:
                if name not in files:
                    raise InvalidInput(f"{self.path} lacks the tensor {name}")
                file = files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(open_tensors(self.path, file))
                tensor: torch.Tensor = opened[file].get_tensor(name)
                return tensor

            yield read


def _fill(
    targets: Mapping[str, torch.Tensor],
    read: Read,
    heads: HeadShards | None,
) -> None:
    """Copy tensors of one process into the parts of this rank.

    Args:
        targets: Tensors by parameter name; every rank has the same names.
        read: Returns the tensor of one process with this name.
        heads: The parameters that are divided over tensor parallel ranks.
    """
    divided = {name: t for name, t in targets.items() if heads and name in heads.names}
    for name, target in targets.items():
        if name not in divided:
            whole = read(name)
            if isinstance(target, DTensor):
                # Every rank takes its rows, without communication.
                whole = distribute_tensor(
                    whole.to(target.dtype),
                    target.device_mesh,
                    target.placements,
                    src_data_rank=None,
                )
            target.copy_(whole)
    if divided:
        assert heads is not None  # else nothing is divided
        heads.fill(divided, read)


def open_folder(
    path: str | Path, rank: int = 0, size: int = 1, types: Sequence[str] = config_json.TYPES
) -> ModelFolder:
    """Open a model folder and check it; allocates no tensor.

    Args:
        path: The folder of a Llama, Qwen2 or Qwen3, dense or with NSA.
        rank: Index of this process among those that open the folder together.
        size: Number of these processes; each checks the digests of its share of the files.
        types: The types of model that the caller can use, each a model_type of config.json.

    Raises:
        InvalidInput: There is no such model, a file cannot be read, leads out of the folder or was
            altered since it was written, or the tensors are not those of config.json; the message
            names the file and the tensors.
        BackendUnavailable: safetensors is not installed, or the model needs transformers.
    """
    path = Path(path)
    before = _stamp(path)
    try:
        return _open(path, rank, size, types)
    except InvalidInput:
        if _stamp(path) == before:
            raise
        return _open(path, rank, size, types)  # a training has replaced the files meanwhile


def _stamp(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(path / INDEX)
        return status.st_ino, status.st_mtime_ns
    return None


def _open(path: Path, rank: int, size: int, types: Sequence[str]) -> ModelFolder:
    check_model(path)
    values = read_json(path, CONFIG)
    with _of_file(path / CONFIG):
        config_json.check_type(values.get("model_type"), types)
        config = config_json.config_of(values)
        values = config_json.known_fields(values)
    companions = _companions(path)
    index = read_json(path, INDEX) if _exists(path, INDEX) else None
    metadata = None if index is None else index.get("metadata")
    own = None
    if index is not None and isinstance(metadata, dict) and metadata.get("nsa") is not None:
        own = _check_own(path, index, metadata["nsa"], rank, size)
    files = _weight_files(path, index)
    files = {name: file for name, file in files.items() if not _BUFFER.fullmatch(name)}
    _check_shapes(path, config, files)
    optimizer: dict[str, str] = {}
    if own is not None:
        if unlisted := sorted({CONFIG, *files.values()} - own.files.keys()):
            raise InvalidInput(f"{path / INDEX}: metadata.nsa.files lacks {_listed(unlisted)}")
        if own.training is not None:
            longest, length = values.get("max_position_embeddings"), own.training.data.length
            if longest is not None and length > longest:
                raise InvalidInput(
                    f"{path / INDEX}: metadata.nsa.training.data.length is {length:,}, but"
                    f" {CONFIG} has max_position_embeddings {longest:,}"
                )
            names = [name for name in own.files if name.startswith(f"{OPTIMIZER}/")]
            optimizer = {tensor: name for name in names for tensor in _header(path, name)}
            _check_optimizer(path, config, own.training, optimizer)
    training = own.training if own is not None else None
    return ModelFolder(path, values, config, files, companions, training, optimizer)


def _exists(folder: Path, name: str) -> bool:
    """Return whether a folder has this name; also a link to nothing is one."""
    return os.path.lexists(folder / name)


def _companions(path: Path) -> list[str]:
    """Return the names of the files of a model beside its weights, each of them checked."""
    names = [name for name in (*_TEXTS, *_LICENSES) if _exists(path, name)]
    for name in names:
        plain_file(path, name, _MAX_FILE)
        if name.endswith(".json") and name not in (TOKENIZER, "vocab.json"):  # these are large
            values = read_json(path, name, _DIGITS)
            if values.get("auto_map") is not None:
                raise InvalidInput(
                    f"{path / name}: auto_map names code, and a model folder is read as data:"
                    f" remove the field if {TOKENIZER} is enough"
                )
    return names


@contextlib.contextmanager
def _of_file(file: Path) -> Iterator[None]:
    """Name the file in errors of the block."""
    try:
        yield
    except InvalidInput as error:
        if str(error).startswith(str(file)):
            raise
        raise InvalidInput(f"{file}: {error}") from error


def plain_file(folder: Path, name: str, most: int | None = None) -> Path:
    """Return the path of a file, which must be a plain file inside the folder.

    Args:
        folder: The folder.
        name: Name of the file.
        most: The largest size in bytes.

    Raises:
        InvalidInput: It is missing, is a pipe or a device, or a link leads out of the folder; or it
            is too large.
    """
    file = folder / name
    try:
        root, target = os.path.realpath(folder), os.path.realpath(file)
        if os.path.commonpath([root, target]) != root:
            raise InvalidInput(
                f"{file} leads out of the folder, to {target}: copy the files themselves, for"
                " example with hf download NAME --local-dir FOLDER"
            )
        status = os.stat(target)
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{file} is not a plain file; put back the file of the model")
    if most is not None and status.st_size > most:
        raise InvalidInput(
            f"{file} is larger than {most >> 20} MiB; put back the file of the model"
        )
    return file


def _unreadable(file: Path, error: Exception) -> InvalidInput:
    reason = getattr(error, "strerror", None) or describe_error(error)
    return InvalidInput(f"{file} cannot be read: {reason}; put back the file of the model")


def _text_of(folder: Path, name: str, most: int) -> str:
    file = plain_file(folder, name, most)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def read_json(folder: Path, name: str, digits: int = 18) -> dict[str, Any]:
    """Read a JSON object of a folder, whose integers have a number of digits at most.

    Raises:
        InvalidInput: The file cannot be read, or is no JSON object.
    """
    file, text = folder / name, _text_of(folder, name, _MAX_JSON)
    try:
        values = json_fields.parse(text, digits)
    except ValueError as error:
        raise InvalidInput(
            f"{file} is not JSON: {describe_error(error)}; put back the file of the model"
        ) from error
    if not isinstance(values, dict):
        raise InvalidInput(f"{file} must be a JSON object, got {shown(values)}")
    return values


@contextlib.contextmanager
def open_tensors(folder: Path, name: str) -> Iterator[Any]:
    """Open a safetensors file of a folder.

    Raises:
        InvalidInput: The file cannot be read; also for errors of the block.
        BackendUnavailable: safetensors is not installed.
    """
    library = require_module("safetensors", "model folders need", "safetensors")
    file = plain_file(folder, name)
    try:
        with open(file, "rb") as start:
            if (size := int.from_bytes(start.read(8), "little")) > _MAX_HEADER:
                raise ValueError(f"its header has {size:,} bytes")
        with library.safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, ValueError, KeyError, library.SafetensorError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(
            f"{file} cannot be read as safetensors: {describe_error(error)}; put back the whole"
            " file"
        ) from error


def _header(folder: Path, name: str) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor of a file."""
    with open_tensors(folder, name) as file:
        parts = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118
        return {tensor: (p.get_dtype(), list(p.get_shape())) for tensor, p in parts.items()}


def _weight_files(path: Path, index: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the file of each tensor of the weights."""
    if index is None:
        if not _exists(path, WEIGHTS):
            raise InvalidInput(
                f"{path} has no {WEIGHTS} and no {INDEX}: give the folder of a model in safetensors"
            )
        return dict.fromkeys(_header(path, WEIGHTS), WEIGHTS)
    if _exists(path, WEIGHTS):
        raise InvalidInput(f"{path} has {WEIGHTS} and {INDEX}: remove the one of another model")
    files = index.get("weight_map")
    if not (
        isinstance(files, dict)
        and all(isinstance(name, str) and Path(name).name == name for name in files.values())
    ):
        raise InvalidInput(f"{path / INDEX}: weight_map must give a file name for each tensor")
    present = {
        (tensor, name) for name in sorted(set(files.values())) for tensor in _header(path, name)
    }
    if names := sorted(present ^ {*files.items()}):
        raise InvalidInput(
            f"{path / INDEX}: weight_map does not match the files:"
            f" {_listed(f'{tensor} in {name}' for tensor, name in names)}"
        )
    return files


def _listed(names: Any, most: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _check_shapes(path: Path, config: LMConfig, files: Mapping[str, str]) -> None:
    """Check that the files have exactly the tensors of the model."""
    if config.n_layers > len(files):
        raise InvalidInput(
            f"{path / CONFIG}: num_hidden_layers is {config.n_layers:,}, but the weights have only"
            f" {len(files):,} tensors"
        )
    expected = weights.shapes(config)
    actual: dict[str, tuple[str, list[int]]] = {}
    for name in sorted(set(files.values())):
        actual |= _header(path, name)
    actual = {name: entry for name, entry in actual.items() if name in files}
    if config.tied and "lm_head.weight" in actual:
        _check_tied(path, files, actual)
        del actual["lm_head.weight"]
    problems = [f"{name} is missing" for name in expected.keys() - actual.keys()]
    problems += [
        f"{name!r:.90} is not a parameter of the model" for name in actual.keys() - expected.keys()
    ]
    for name in expected.keys() & actual.keys():
        dtype, shape = actual[name]
        if shape != expected[name] or dtype not in _FLOATS:
            problems.append(f"{name} must be float {expected[name]}, got {dtype} {shape}")
    if problems:
        raise InvalidInput(f"{path}: {_listed(sorted(problems))}; put back the files of one model")


def _check_tied(path: Path, files: Mapping[str, str], entries: Mapping[str, Any]) -> None:
    names = ("lm_head.weight", "model.embed_tokens.weight")
    values = []
    for name in names if entries[names[0]] == entries.get(names[1]) else ():
        with open_tensors(path, files[name]) as file:
            values.append(file.get_tensor(name))
    if not values or not torch.equal(*values):
        raise InvalidInput(
            f"{path}: {names[0]} differs from {names[1]}, but {CONFIG} ties them"
            " (tie_word_embeddings)"
        )


def _check_own(path: Path, index: Mapping[str, Any], entry: Any, rank: int, size: int) -> _Own:
    """Return the entry of this library in an index, and check the digests of the files."""
    where = f"{path / INDEX}: metadata.nsa"
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        found = entry.get("format") if isinstance(entry, dict) else entry
        raise InvalidInput(
            f"{where} must have format {FORMAT}, got {shown(found)}: read the folder with the"
            " version of this library that wrote it"
        )
    if entry.get("digest") != index_digest(index):
        raise InvalidInput(
            f"{path / INDEX} was altered after it was written; restore it from a copy"
        )
    own = json_fields.build(_Own, entry, where)
    for name in sorted(own.files)[rank::size]:
        file, expected = plain_file(path, name), own.files[name]
        # The sizes first: a file may be huge.
        if os.stat(file).st_size != expected.get("size") or file_facts(file) != expected:
            raise InvalidInput(
                f"{file} was altered after it was written: its size and digest are not those in"
                f" {INDEX}; restore it from a copy"
            )
    return own


def _check_optimizer(
    path: Path, config: LMConfig, training: Training, files: Mapping[str, str]
) -> None:
    """Check that the tensors are the moments of the model and the random state of each process."""
    with torch.device("meta"):
        model = LanguageModel(config)
    moments = {
        f"{moment}.{name}": list(parameter.shape)
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
    }
    actual: dict[str, tuple[str, list[int]]] = {}
    for name in sorted(set(files.values())):
        actual |= _header(path, name)
    own = {name for name in actual if _RANDOM.fullmatch(name)}
    wrong = [
        name
        for name in actual.keys() - own
        if name not in moments or actual[name][0] not in _FLOATS or actual[name][1] != moments[name]
    ]
    if actual.keys() - own:  # none before the first step
        wrong += moments.keys() - actual.keys()
    ranks = range(min(training.processes, len(own) + 1))  # of a stranger, it may be huge
    wrong += {f"random.cpu.{rank}" for rank in ranks} - own
    if wrong:
        raise InvalidInput(
            f"{path / OPTIMIZER}: the tensors are not those of the model and its processes:"
            f" {_listed(sorted(wrong))}; put back the files of one run"
        )


def file_facts(file: Path) -> dict[str, Any]:
    """Return the size and the digest of a file, as the index has them."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(file, "rb") as opened:
            while chunk := opened.read(1 << 22):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise _unreadable(file, error) from error
    return {"size": size, "sha256": digest.hexdigest()}


def index_digest(index: Mapping[str, Any]) -> str:
    """Return the digest of an index without its own field for it."""
    metadata = index["metadata"]
    own = {name: value for name, value in metadata["nsa"].items() if name != "digest"}
    content = {**index, "metadata": {**metadata, "nsa": own}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
