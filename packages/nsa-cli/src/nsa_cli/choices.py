"""The options that several commands share, and the parsers of their values.

Only :func:`pick_device` imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nsa_cli import output
from nsa_core.contract import DTYPES, SLOTS
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.limits import read_at_most
from nsa_core.plan.registry import named_backends
from nsa_core.util.interruption import recorded_signals
from nsa_core.util.text import did_you_mean
from nsa_models.lm.run_folder import check_model

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

_LARGEST_FILE = 1 << 30  # bytes of a text, which memory holds


def options_on_command_line(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the user typed; defaults are left out."""
    return {
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


ADVANCED = "Advanced"  # the panel of all options of a command but the twelve most important
advanced = functools.partial(typer.Option, rich_help_panel=ADVANCED)


def completion(
    *values: str, listed: Callable[[], Sequence[str]] = tuple
) -> Callable[[str], list[str]]:
    """Return the ``autocompletion`` of an option whose value is one of ``values``, or several.

    Args:
        values: The values.
        listed: Returns further values when a shell asks for them.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [before + comma + value for value in (*values, *listed())]

    return complete


def shown(*values: str) -> dict[str, Any]:
    """Return the ``metavar`` and ``autocompletion`` of an option that takes words of ``values``."""
    return {"metavar": "|".join(values), "autocompletion": completion(*values)}


DTYPE_CHOICES = {**shown(*SHORT_DTYPES), "autocompletion": completion(*DTYPES, *SHORT_DTYPES)}


def installed_backends() -> list[str]:
    """Return the names of the installed backends, from the metadata of their distributions."""
    from nsa_core.plan.loading import installed

    return sorted({plugin.name for plugin in installed()})


complete_backend = completion(listed=installed_backends)
complete_pairs = completion(
    "auto",
    listed=lambda: [
        *installed_backends(),
        *(f"{slot}={name}" for slot in SLOTS for name in installed_backends()),
    ],
)
complete_device = completion("auto", "cpu", "cuda")

Device = Annotated[
    str,
    typer.Option(
        help="auto: cuda if a GPU is available, else cpu.",
        metavar="auto|cpu|cuda|cuda:N",
        autocompletion=complete_device,
    ),
]
SHAPE = "HEADS/KV_HEADS/WIDTH"
BLOCKS = "l,d,l',n,w"
BACKENDS = "NAME|SLOT=NAME,.."
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="Print JSON in place of the tables; with FILE, write it there and print the tables.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite output files.")]
Phase = Annotated[
    Literal["prefill", "decode"], typer.Option("--phase", help="Phase of the request.")
]
Threads = Annotated[int, advanced(help="CPU threads.", min=1)]
Backends = Annotated[
    str,
    advanced(
        metavar=BACKENDS,
        help="auto, one backend for all slots, or pairs such as win=fa2,cmp=triton.",
        autocompletion=complete_pairs,
    ),
]
BackendOfSlot = Annotated[
    str | None,
    typer.Option(
        help="Backend for this slot. Default: highest rank.",
        metavar="NAME",
        autocompletion=complete_backend,
    ),
]


def as_options(names: Sequence[str]) -> str:
    """Format parameter names as options: "--page-size" for page_size."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def refuse_options(names: Sequence[str], why: str) -> None:
    """Refuse the options of these parameters, which have no effect here.

    Raises:
        InvalidInput: There are any.
    """
    if names:
        fix = "leave it out" if len(names) == 1 else "leave them out"
        raise InvalidInput(f"{as_options(names)}: {why}; {fix}")


@contextlib.contextmanager
def errors_name_options(names: Mapping[str, str]) -> Iterator[None]:
    """Replace field names in the message of an InvalidInput by the options that set them.

    A field name is replaced only where a clause of the message starts with it ("clip must",
    "batch 3 does", "graph=True needs") or ends with it ("a multiple of n_kv_heads: "), so that
    paths in the message stay unchanged.

    Args:
        names: Maps each field to the parameter of its option, such as "learning_rate" to "lr".

    Raises:
        InvalidInput: The body raised one; the message names options.
    """
    try:
        yield
    except InvalidInput as error:
        fields = rf"(^|; | over | of | with )({'|'.join(names)})(=True|(?= must | \d|: ))"
        raise InvalidInput(
            re.sub(fields, lambda m: m[1] + as_options([names[m[2]]]), str(error))
        ) from error


def check_page_size(page_size: int | None, select_block_size: int) -> None:
    """Check --page-size of a cache of keys and values, before torch is imported.

    Raises:
        InvalidInput: It is not a multiple of the selection block; the message names the nearest.
    """
    if page_size is not None and page_size % select_block_size:
        fitting = max(1, round(page_size / select_block_size)) * select_block_size
        raise InvalidInput(
            f"--page-size must be a multiple of the selection block of {select_block_size} tokens,"
            f" such as {fitting}, got {page_size}"
        )


def split_commas(text: str) -> list[str]:
    """Split ``text`` at commas, strip each part and drop empty ones."""
    return [word.strip() for word in text.split(",") if word.strip()]


def dtype_name(text: str) -> str:
    """Return the name of one dtype: "bfloat16" for "bfloat16" or "bf16".

    Raises:
        InvalidInput: The contract lists no dtype of this name; the message suggests one.
    """
    name = SHORT_DTYPES.get(text, text)
    if name not in DTYPES:
        forms = (f"{long} ({short})" for short, long in SHORT_DTYPES.items())
        raise InvalidInput(
            f"--dtype must be one of {', '.join(forms)}, got {text!r}"
            + did_you_mean(text.lower(), (*DTYPES, *SHORT_DTYPES))
        )
    return name


def dtype_names(text: str) -> list[str]:
    """Parse --dtype into long names of dtypes without duplicates.

    Raises:
        InvalidInput: ``text`` is empty or contains a dtype that the contract does not list.
    """
    return list(dict.fromkeys(dtype_name(word) for word in split_commas(text) or [text]))


def one_dtype(text: str) -> str:
    """Parse --dtype of a command that takes one dtype into its long name.

    Raises:
        InvalidInput: ``text`` is empty, lists several dtypes or an unknown one.
    """
    names = dtype_names(text)
    if len(names) > 1:
        raise InvalidInput(f"--dtype must be one dtype, got {', '.join(names)}")
    return names[0]


def block_sizes(text: str) -> tuple[int, ...]:
    """Parse --blocks into integers; the shape checks their number later.

    Raises:
        InvalidInput: A part of ``text`` is not an integer.
    """
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise InvalidInput(f"--blocks must be five integers l,d,l',n,w, got {text!r}") from None


def tokens(least: int = 1) -> Callable[[int | str], int]:
    """Return the parser of an option that takes a number of tokens, such as 512, 64k or 1M.

    Args:
        least: The smallest number that the option accepts.
    """

    def tokens(value: int | str) -> int:  # some versions of typer print its name
        from nsa_bench.shapes import parse_length

        try:
            return parse_length(str(value), least)
        except InvalidInput as error:
            raise typer.BadParameter(str(error)) from error

    return tokens


def some_of(option: str, text: str, choices: Collection[str]) -> list[str]:
    """Parse the value of ``option``, a comma-separated list of ``choices``.

    Raises:
        InvalidInput: ``text`` is empty or has another word.
    """
    words = split_commas(text) or [text]
    for word in words:
        if word not in choices:
            raise InvalidInput(
                f"{option} must be one or several of {', '.join(choices)}, got {word!r}"
                + did_you_mean(word, choices)
            )
    return words


def parse_backends(text: str) -> dict[str, str] | None:
    """Parse --backends into the ``backends`` argument of :class:`nsa_core.NSAttention`.

    Raises:
        InvalidInput: ``text`` names an unknown slot or backend, or one slot twice.
    """
    return pairs_of_backends(text, "--backends") or None


def pairs_of_backends(text: str, option: str) -> dict[str, str]:
    """Return the backend of each slot that the value of ``option`` names.

    Raises:
        InvalidInput: ``text`` names an unknown slot or backend, or one slot twice.
    """
    try:
        named = named_backends(text)
    except InvalidInput as error:
        raise InvalidInput(re.sub("^backends", option, str(error))) from error
    check_backends(named.values(), option)
    return named


def check_backends(names: Iterable[str | None], option: str) -> None:
    """Check that every name in ``option`` is one of a backend, before torch is imported.

    A plugin may register a backend under another name than that of its entry point, so an unknown
    name makes this function load the plugins.

    Raises:
        InvalidInput: No backend has a name; the message lists all.
    """
    unseen = {name for name in names if name is not None} - {"auto", *installed_backends()}
    if unseen and (problems := output.find_backends().unknown(sorted(unseen))):
        raise InvalidInput(f"{option}: {'; '.join(problems)}")


def check_checkpoint(folder: Path) -> None:
    """Check that --checkpoint is the folder of a model, before torch is imported.

    Raises:
        InvalidInput: It is not a folder, or has no config.json.
    """
    with output.naming("--checkpoint"):
        check_model(folder)


def read_file(option: str, path: Path) -> bytes:
    """Return the content of the file that ``option`` names.

    Raises:
        InvalidInput: The file cannot be read, is empty, or has more than a GiB.
    """
    try:
        with output.naming(option):
            content = read_at_most(path, _LARGEST_FILE)
    except OSError as error:
        raise InvalidInput(f"{option} {path}: {error.strerror or error}; give a file") from error
    if not content:
        raise InvalidInput(f"{option} {path} has 0 bytes; give a file with text")
    return content


def read_text(path: Path | None, min_bytes: int = 1) -> tuple[str, bytes]:
    """Return the name and the content of --text; None reads the documentation of Python.

    Raises:
        InvalidInput: The file cannot be read, or is empty.
    """
    if path is not None:
        return path.name, read_file("--text", path)
    import platform

    from nsa_bench.python_docs import library_text

    return f"documentation of Python {platform.python_version()}", library_text(min_bytes)


def pick_device(text: str, threads: int | None = None) -> str:
    """Return the device named by --device and set torch's number of CPU threads.

    Args:
        text: "cpu", "cuda", "cuda:N", or "auto": cuda if a GPU is available, else cpu.
        threads: Number of CPU threads; None keeps torch's setting.

    Raises:
        InvalidInput: ``text`` is another word; torch is not imported for it.
        BackendUnavailable: The device is not available on this machine.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", text):
        raise InvalidInput(
            f"--device must be auto, cpu, cuda or cuda:N, got {text!r}"
            + did_you_mean(text, ("auto", "cpu", "cuda"))
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some builds log every start of the profiler
    with recorded_signals() as interruption, interruption.ending_process():
        import torch

    from nsa_core.plan.options import usable_device

    if threads is not None:
        torch.set_num_threads(threads)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if text == "auto" else text
    try:
        usable_device(device)
    except (InvalidInput, BackendUnavailable) as error:
        message = re.sub(r"^device '(\S+)'", r"--device \1", str(error))
        hint = "; leave --device out to run on the CPU" * isinstance(error, BackendUnavailable)
        raise type(error)(message + hint) from error
    return device
