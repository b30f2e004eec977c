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
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error
from nsa_models.lm import config_json, weights
from nsa_models.lm.config import LMConfig
from nsa_models.lm.fingerprint import Fingerprint
from nsa_models.lm.head_shards import HeadShards
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import CONFIG, INDEX, OPTIMIZER
from nsa_models.lm.task import DataSpec
from nsa_models.lm.tokens import TOKENIZER, ByteTokenizer, FileTokenizer, Tokenizer

WEIGHTS = "model.safetensors"  # of a model in one file
MOMENTS = ("exp_avg", "exp_avg_sq")
FORMAT = 1
# Texts that a model needs beside its weights.
_TEXTS = (
    *("generation_config.json", "tokenizer*.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template*"),
)
_MAX_JSON = 1 << 26  # bytes
# Names of dtypes in safetensors.
_FLOATS = ("F64", "F32", "F16", "BF16")
_BUFFERS = "rotary_emb.inv_freq"  # in old checkpoints of Llama; transformers ignores it too
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
    """

    step: int
    tokens: int
    recipe: Recipe
    data: DataSpec
    corpus: Fingerprint
    position: list[dict[str, int]]
    tokenizer: str | None
    processes: int

    def to_json(self) -> dict[str, Any]:
        """Return the values for :meth:`of_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, values: Any, where: str) -> Training:
        """Check the values of :meth:`to_json`.

        Raises:
            InvalidInput: A field is missing, unknown, of another type or out of range.
        """
        values = fields_of(cls, values, where)
        values["recipe"] = Recipe(**fields_of(Recipe, values["recipe"], f"{where}.recipe"))
        values["data"] = DataSpec(**fields_of(DataSpec, values["data"], f"{where}.data"))
        wrong = [name for name in ("step", "tokens", "processes") if values[name] < 0]
        if not all(
            isinstance(lane, dict)
            and all(type(value) is int and 0 <= value < 2**63 for value in lane.values())
            for lane in values["position"]
        ):
            wrong.append("position")
        if not all(isinstance(value, str) for value in values["corpus"].values()):
            wrong.append("corpus")
        if values["tokenizer"] not in ("bytes", "file", None):
            wrong.append("tokenizer")
        if wrong:
            raise InvalidInput(f"{where}: {', '.join(wrong)} cannot be {values[wrong[0]]!r:.60}")
        return cls(**values)


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "str | None": (str, type(None)),
    "list[dict[str, int]]": (list,),
}


def fields_of(cls: type, values: Any, where: str) -> dict[str, Any]:
    """Check that JSON values are the fields of a data class, each of its type.

    Args:
        cls: The class; fields of other types than numbers and strings are JSON objects.
        values: The values.
        where: Their place, for errors.

    Raises:
        InvalidInput: A field is missing, unknown, or of another type; the message names all.
    """
    if not isinstance(values, dict):
        raise InvalidInput(f"{where} must be a JSON object, got {type(values).__name__}")
    known = {str(field.name): str(field.type) for field in dataclasses.fields(cls)}
    problems = [f"{name} is missing" for name in known.keys() - values.keys()]
    problems += [f"{name!r:.60} is unknown" for name in values.keys() - known.keys()]
    for name, kind in known.items():
        types = _JSON_TYPES.get(kind, (dict,))
        value = values.get(name)
        if name in values and (
            not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        ):
            problems.append(f"{name} must be {kind}, got {value!r:.60}")
    if problems:
        raise InvalidInput(f"{where}: {'; '.join(sorted(problems))}")
    return dict(values)


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model folder whose files are checked; tensors stay on the disk until they are needed.

    Attributes:
        path: The folder.
        values: The content of config.json.
        config: The sizes of the model.
        files: The file of each tensor.
        training: The state of a run; None for another model.
    """

    path: Path
    values: dict[str, Any]
    config: LMConfig
    files: dict[str, str]
    training: Training | None
    _optimizer_files: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def libraries(self) -> list[str]:
        """Return the optional libraries that the tokenizer needs."""
        own = self.training.tokenizer if self.training is not None else "file"
        return ["tokenizers"] if own == "file" and (self.path / TOKENIZER).is_file() else []

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None if the folder has none.

        Raises:
            InvalidInput: It cannot be read, or has ids beyond the vocabulary of the model.
        """
        kind = "file" if self.training is None else self.training.tokenizer
        if kind == "bytes":
            return ByteTokenizer()
        if kind is None or not (self.path / TOKENIZER).is_file():
            return None
        file = plain_file(self.path, TOKENIZER)
        ends = self.values.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        end = next((number for number in ends if type(number) is int), None)
        tokenizer = FileTokenizer(_text_of(file), str(file), end)
        if tokenizer.ids > self.config.vocab_size:
            raise InvalidInput(
                f"{file} has ids up to {tokenizer.ids - 1:,}, but the model has a vocabulary of"
                f" {self.config.vocab_size:,}: put back the tokenizer of this model"
            )
        return tokenizer

    def tokenizer_texts(self) -> dict[str, str]:
        """Return the texts of the tokenizer's files, and of the other texts of the model."""
        names = (p.name for pattern in _TEXTS for p in sorted(self.path.glob(pattern)))
        return {name: _text_of(plain_file(self.path, name)) for name in names}

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


def open_folder(path: str | Path, rank: int = 0, size: int = 1) -> ModelFolder:
    """Open a model folder and check it; allocates no tensor.

    Args:
        path: The folder of a Llama, Qwen2 or Qwen3, dense or with NSA.
        rank: Index of this process among those that open the folder together.
        size: Number of these processes; each checks the digests of its share of the files.

    Raises:
        InvalidInput: There is no such model, a file cannot be read, leads out of the folder or was
            altered since it was written, or the tensors are not those of config.json; the message
            names the file and the tensors.
        BackendUnavailable: safetensors is not installed, or the model needs transformers.
    """
    path = Path(path)
    before = _stamp(path)
    try:
        return _open(path, rank, size)
    except InvalidInput:
        if _stamp(path) == before:
            raise
        return _open(path, rank, size)  # a training has replaced the files meanwhile


def _stamp(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        status = os.stat(path / INDEX)
        return status.st_ino, status.st_mtime_ns
    return None


def _open(path: Path, rank: int, size: int) -> ModelFolder:
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise InvalidInput(
            f"{path} {problem}: give the folder of a model, of nsa train, nsa convert or"
            " save_pretrained"
        )
    values = read_json(path, CONFIG)
    with _of_file(path / CONFIG):
        config = config_json.config_of(values)
    index = read_json(path, INDEX) if (path / INDEX).exists() else {}
    own = index.get("metadata", {})
    own = own.get("nsa") if isinstance(own, dict) else None
    training = None
    if own is not None:
        training = _check_own(path, index, own, rank, size)
    files = _weight_files(path, index)
    _check_shapes(path, config, files)
    optimizer = {}
    if own is not None and training is not None:
        names = [name for name in own["files"] if name.startswith(f"{OPTIMIZER}/")]
        optimizer = {tensor: name for name in names for tensor in _header(path, name)}
        with _of_file(path / INDEX):
            _check_optimizer(path, config, training, optimizer)
    return ModelFolder(path, values, config, files, training, optimizer)


@contextlib.contextmanager
def _of_file(file: Path) -> Iterator[None]:
    """Name the file in errors of the block."""
    try:
        yield
    except InvalidInput as error:
        if str(error).startswith(str(file)):
            raise
        raise InvalidInput(f"{file}: {error}") from error


def plain_file(folder: Path, name: str) -> Path:
    """Return the path of a file, which must be a plain file inside the folder.

    Raises:
        InvalidInput: It is missing, is a pipe or a device, or a link leads out of the folder.
    """
    file = folder / name
    root, target = os.path.realpath(folder), os.path.realpath(file)
    try:
        if os.path.commonpath([root, target]) != root:
            raise InvalidInput(
                f"{file} leads out of the folder, to {target}: copy the files themselves, for"
                " example with hf download NAME --local-dir FOLDER"
            )
        mode = os.stat(target).st_mode
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file} cannot be read: {describe_error(error)}") from error
    if not stat.S_ISREG(mode):
        raise InvalidInput(f"{file} is not a plain file; put back the file of the model")
    return file


def _text_of(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_JSON:
            raise InvalidInput(f"{file} is larger than {_MAX_JSON >> 20} MiB")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file} cannot be read: {describe_error(error)}") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of a folder.

    Raises:
        InvalidInput: The file cannot be read, or is no JSON object.
    """
    file = plain_file(folder, name)
    try:
        values = json.loads(_text_of(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{file} is not JSON: {describe_error(error)}") from error
    if not isinstance(values, dict):
        raise InvalidInput(f"{file} must be a JSON object, got {type(values).__name__}")
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


def _weight_files(path: Path, index: Mapping[str, Any]) -> dict[str, str]:
    """Return the file of each tensor of the weights."""
    if not index:
        if not (path / WEIGHTS).exists():
            raise InvalidInput(
                f"{path} has no {WEIGHTS} and no {INDEX}: give the folder of a model in safetensors"
            )
        return dict.fromkeys(_header(path, WEIGHTS), WEIGHTS)
    if (path / WEIGHTS).exists():
        raise InvalidInput(f"{path} has {WEIGHTS} and {INDEX}: remove the one of another model")
    files = index.get("weight_map")
    if not (
        isinstance(files, dict)
        and all(isinstance(name, str) and Path(name).name == name for name in files.values())
    ):
        raise InvalidInput(f"{path / INDEX}: weight_map must give a file name for each tensor")
    present = {
        tensor: name for name in sorted(set(files.values())) for tensor in _header(path, name)
    }
    if present != files:
        names = sorted({*files.items()} ^ {*present.items()})
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
    actual = {name: entry for name, entry in actual.items() if not name.endswith(_BUFFERS)}
    if config.tied and "lm_head.weight" in actual:
        _check_tied(path, files)
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


def _check_tied(path: Path, files: Mapping[str, str]) -> None:
    names = ("lm_head.weight", "model.embed_tokens.weight")
    values = []
    for name in names:
        with open_tensors(path, files.get(name, files[names[0]])) as file:
            values.append(file.get_tensor(name))
    if not torch.equal(*values):
        raise InvalidInput(
            f"{path}: {names[0]} differs from {names[1]}, but {CONFIG} ties them"
            " (tie_word_embeddings)"
        )


def _check_own(
    path: Path, index: Mapping[str, Any], own: Any, rank: int, size: int
) -> Training | None:
    """Check the digests of a folder that this library wrote; return the state of a run."""
    where = f"{path / INDEX}: metadata.nsa"
    if not isinstance(own, dict) or own.get("format") != FORMAT:
        found = own.get("format") if isinstance(own, dict) else own
        raise InvalidInput(
            f"{where} must have format {FORMAT}, got {found!r:.60}: read the folder with the"
            " version of this library that wrote it"
        )
    if own.get("digest") != index_digest(index):
        raise InvalidInput(
            f"{path / INDEX} was altered after it was written; restore it from a copy"
        )
    files = own.get("files")
    if not (isinstance(files, dict) and all(isinstance(facts, dict) for facts in files.values())):
        raise InvalidInput(f"{where}.files must give size and digest of each file")
    for name in sorted(files)[rank::size]:
        file, expected = plain_file(path, name), files[name]
        if file_facts(file) != expected:
            raise InvalidInput(
                f"{file} was altered after it was written: its size and digest are not those in"
                f" {INDEX}; restore it from a copy"
            )
    training = own.get("training")
    return None if training is None else Training.of_json(training, f"{where}.training")


def _check_optimizer(
    path: Path, config: LMConfig, training: Training, files: Mapping[str, str]
) -> None:
    """Check that the moments are those of the model, and that every process has random states."""
    with torch.device("meta"):
        model = LanguageModel(config)
    shapes = {
        f"{moment}.{name}": list(parameter.shape)
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
    }
    actual: dict[str, tuple[str, list[int]]] = {}
    for name in sorted(set(files.values())):
        actual |= _header(path, name)
    wrong = [name for name, (_, shape) in actual.items() if shape != shapes.get(name, shape)]
    wrong += [
        f"random.cpu.{rank}"
        for rank in range(training.processes)
        if f"random.cpu.{rank}" not in actual
    ]
    if wrong:
        raise InvalidInput(f"the optimizer does not match the model: {_listed(sorted(wrong))}")
    if len(training.position) != training.recipe.batch:
        raise InvalidInput(
            f"training.position has {len(training.position)} lanes, but a step has"
            f" {training.recipe.batch} rows"
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
        raise InvalidInput(f"{file} cannot be read: {describe_error(error)}") from error
    return {"size": size, "sha256": digest.hexdigest()}


def index_digest(index: Mapping[str, Any]) -> str:
    """Return the digest of an index without its own field for it."""
    metadata = index["metadata"]
    own = {name: value for name, value in metadata["nsa"].items() if name != "digest"}
    content = {**index, "metadata": {**metadata, "nsa": own}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
