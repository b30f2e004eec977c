"""Score a checkpoint, of transformers or of `nsa train`, on tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error, did_you_mean
from nsa_models.lm.run_folder import CHECKPOINT, is_run

EXTRA = "nsa-models[eval]"
SEED = 1234
# Methods of the harness's models that show progress bars, also in files and pipes.
_SHOW_PROGRESS = (
    "loglikelihood",
    "loglikelihood_rolling",
    "generate_until",
    "_loglikelihood_tokens",
)


@dataclasses.dataclass(frozen=True)
class Score:
    """The value of one metric of a task or of a group of tasks."""

    task: str
    metric: str
    value: float
    stderr: float | None  # standard error; None if the metric has none
    higher_is_better: bool | None
    examples: int | None  # how many the value is from; None for a group


def evaluate(
    checkpoint: str | Path,
    tasks: Sequence[str],
    *,
    lengths: Sequence[int] = (),
    limit: int | None = None,
    fewshot: int | None = None,
    task_folder: str | Path | None = None,
    batch: int = 1,
    dtype: str = "auto",
    device: str = "cpu",
    backends: dict[str, str] | None = None,
) -> list[Score]:
    """Score a checkpoint on tasks of the lm-evaluation-harness.

    It sets the seeds of random, numpy and torch.

    Args:
        checkpoint: A folder of transformers with a causal language model and its tokenizer, or the
            folder or the checkpoint file of a run of `nsa train` on text.
        tasks: Names of tasks or groups, such as ruler.
        lengths: Lengths in tokens. The model reads at most the largest; tasks that make texts of
            given lengths, such as ruler, make these. Default: what the model was trained for.
        limit: Number of examples of each task, and of each of ``lengths`` in a task that makes its
            texts; default: all.
        fewshot: Number of solved examples before each question; default: the task's own.
        task_folder: A folder with definitions of further tasks, as YAML.
        batch: Examples per forward pass.
        dtype: Dtype of the parameters, such as "bfloat16"; "auto" keeps that of the checkpoint.
        device: A device of torch.
        backends: As in :class:`nsa_core.NSAttention`; for checkpoints of `nsa train` only.

    Returns:
        The scores, in the order of the harness: tasks, then groups.

    Raises:
        InvalidInput: There is no such checkpoint, task or dtype, or the task refuses the model.
        BackendUnavailable: A library or the data of a task is missing.
    """
    checkpoint = Path(checkpoint)
    trained_here = _is_trained_here(checkpoint)
    if backends and not trained_here:
        raise InvalidInput(
            f"backends must be None (auto) for checkpoint {checkpoint}, because it is not of"
            f" `nsa train`, got {backends}; for a model with NSA, set nsa_backends in config.json"
        )
    if task_folder is not None and not Path(task_folder).is_dir():
        raise InvalidInput(f"task_folder must be a folder, got {task_folder}")
    if not tasks:
        raise InvalidInput("tasks must name tasks or groups of the lm-evaluation-harness, got none")
    _check_dtype(dtype)
    for library in ("lm_eval", "transformers"):
        require_module(library, "an evaluation needs", EXTRA)
    metadata: dict[str, Any] = {"max_seq_lengths": list(lengths)} if lengths else {}
    if not trained_here:
        metadata["tokenizer"] = str(checkpoint)  # sizes the texts that tasks make
    manager = _task_manager(tasks, task_folder, metadata)
    longest = max(lengths) if lengths else None
    model: Any
    if trained_here:
        from nsa_models.evaluation.trained import TrainedModel

        model = TrainedModel(checkpoint, longest, batch, dtype, device, backends)
    else:
        model = _load(checkpoint, longest, batch, dtype, device)
    if not sys.stderr.isatty():
        _hide_progress(model)
    return _scores(_run(model, tasks, manager, limit, fewshot))


def _check_dtype(dtype: str) -> None:
    import torch

    known = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise InvalidInput(
            'dtype must be "auto" or a floating-point dtype of torch, such as "bfloat16", got'
            f" {dtype!r}"
        )


def _hide_progress(model: Any) -> None:
    """Let a model of the harness show no progress bars, whatever its callers pass."""

    def hidden(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: method(*args, **{**options, "disable_tqdm": True})

    for name in _SHOW_PROGRESS:
        setattr(model, name, hidden(getattr(model, name)))


def _is_trained_here(checkpoint: Path) -> bool:
    """Return whether ``checkpoint`` is of `nsa train`, not of transformers.

    Raises:
        InvalidInput: It is neither.
    """
    if not checkpoint.exists():
        raise InvalidInput(
            f"checkpoint must be a folder on this machine, got {checkpoint}, which does not exist"
        )
    if is_run(checkpoint):
        return True
    if not (checkpoint / "config.json").is_file():
        raise InvalidInput(
            f"checkpoint must hold config.json, as folders of transformers do, or {CHECKPOINT}, as"
            f" folders of `nsa train` do, got {checkpoint}"
        )
    return False


def _task_manager(tasks: Sequence[str], folder: str | Path | None, metadata: dict[str, Any]) -> Any:
    """Return a manager that knows every task.

    Raises:
        InvalidInput: It does not know some; the message names them.
    """
    from lm_eval.tasks import TaskManager

    if folder is not None:  # reading the thousands of tasks of the harness takes seconds
        manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
        if all(manager.match_tasks([task]) for task in tasks):
            return manager
    manager = TaskManager(include_path=None if folder is None else str(folder), metadata=metadata)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        names = ", ".join(map(repr, unknown))
        hint = did_you_mean(unknown[0], manager.all_tasks)
        raise InvalidInput(
            "tasks must name tasks or groups of the lm-evaluation-harness, as `lm-eval ls tasks`"
            f" lists them, got {names}{hint}"
        )
    return manager


def _load(folder: Path, longest: int | None, batch: int, dtype: str, device: str) -> Any:
    """Return the model of a folder of transformers, as the harness calls it.

    Raises:
        InvalidInput: transformers cannot load it, or it has no tokenizer.
    """
    import transformers

    importlib.import_module("nsa_models.hf")  # registers the models with NSA
    from lm_eval.models.huggingface import HFLM

    from nsa_models.hf.tokenizer import read_tokenizer

    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if isinstance(error, NSAError):
            raise
        raise InvalidInput(
            f"transformers cannot load checkpoint {folder}: {describe_error(error)}"
        ) from error
    tokenizer = read_tokenizer(folder)
    model = model.to(device)  # from_pretrained has called eval()
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that it gets a model and not a name
    try:
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=longest)
    finally:
        log.setLevel(level)


def _run(
    model: Any, tasks: Sequence[str], manager: Any, limit: int | None, fewshot: int | None
) -> dict[str, Any]:
    """Return the results of the harness.

    Raises:
        InvalidInput: A task refuses the model.
        BackendUnavailable: A library or the data of a task is missing.
    """
    from lm_eval import evaluate as run_tasks
    from transformers import set_seed

    names = ", ".join(tasks)
    set_seed(SEED)
    try:
        with _no_metadata_hint():
            loaded = manager.load(list(tasks))
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            if own != 0:  # 0: the task refuses solved examples
                count = (own or 0) if fewshot is None else fewshot
                task.set_config(key="num_fewshot", value=count)
            task.set_fewshot_seed(seed=SEED)
        samples = None
        if limit is not None:
            samples = {name: _first(task, limit) for name, task in loaded["tasks"].items()}
        results: dict[str, Any] = run_tasks(
            lm=model, task_dict=loaded, samples=samples, log_samples=False
        )
    except NSAError:
        raise
    except ImportError as error:
        raise BackendUnavailable(
            f"{names} needs more libraries: {describe_error(error)}"
        ) from error
    except OSError as error:
        if error.errno is not None and not isinstance(error, FileNotFoundError):
            raise  # of this machine, such as a full disk
        raise BackendUnavailable(
            f"the data of {names} cannot be loaded: {describe_error(error)}"
        ) from error
    except (ValueError, LookupError, AssertionError) as error:
        raise InvalidInput(f"{names} cannot run on this model: {describe_error(error)}") from error
    return results


@contextlib.contextmanager
def _no_metadata_hint() -> Iterator[None]:
    """Hide what the harness says about its option --metadata, which :func:`evaluate` sets."""
    log = logging.getLogger("lm_eval.api.task")

    def is_other(record: logging.LogRecord) -> bool:
        return "Custom kwargs can be passed to `--metadata`" not in record.getMessage()

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def _first(task: Any, limit: int) -> list[int]:
    """Return the indices of the first ``limit`` examples of a task, or of each of its lengths.

    Tasks that make texts of several lengths, such as ruler, list all examples of one length before
    those of the next, so the first ones alone would be of one length.
    """
    docs = task.eval_docs
    if "max_length" not in (getattr(docs, "column_names", None) or ()):
        return list(range(min(limit, len(docs))))
    seen: Counter[int] = Counter()
    chosen = []
    for index, length in enumerate(docs["max_length"]):
        seen[length] += 1
        if seen[length] <= limit:
            chosen.append(index)
    return chosen


def _scores(results: dict[str, Any]) -> list[Score]:
    """Return the scores of tasks and groups; lengths that ruler did not make are left out."""
    scores = []
    for task, values in (results["results"] | results.get("groups", {})).items():
        better = results["higher_is_better"].get(task, {})
        examples = results["n-samples"].get(task, {}).get("effective")
        for key, value in values.items():
            metric, comma, variant = key.partition(",")
            if not comma or metric.endswith("_stderr") or (metric.isdigit() and value == -1):
                continue
            stderr = values.get(f"{metric}_stderr,{variant}")
            scores.append(
                Score(
                    task,
                    metric if variant == "none" else f"{metric} ({variant})",
                    float(value),
                    float(stderr) if isinstance(stderr, (int, float)) else None,
                    better.get(metric),
                    examples,
                )
            )
    return scores
