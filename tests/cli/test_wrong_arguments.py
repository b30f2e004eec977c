"""A wrong name, path, size, dtype or task is refused before torch is imported."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

# Runs commands in a process that cannot import torch, and prints their codes and errors.
SCRIPT = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from nsa_cli.app import main
answers = []
for words in json.loads(sys.stdin.read()):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(words)
        except SystemExit as end:
            answers.append((end.code, err.getvalue()))
print(json.dumps(answers))
"""
GPU, DEVICE = "unknown GPU 'a1000'; did you mean 'a100'?", "--device must be auto, cpu, cuda or"
BACKEND = "unknown backend 'nope' (known: fa2, sdpa, triton)"
DTYPE, SLOT = "got 'fp17'; did you mean 'fp16'?", "unknown slot 'slot'; did you mean 'select'?"
SHAPE = "--shape must be HEADS/KV_HEADS/WIDTH such as 12/2/64"
TOKENS = "--length: '2q' is not a number of tokens from 1"
MISSING, NO_MODEL = (
    "/no/such: No such file or directory; give a file",
    "/no/such does not exist: give the fold",
)
NO_FOLDER = "/no/such/x: the directory /no/such does not exist; create it first"
IS_FOLDER = "packages is a folder; give the path of a file, such as packages/NAME"
READ_ONLY = "/proc/x: no file can be created in /proc: "
PAGES = "--page-size must be a multiple of the selection block of 64 tokens, such as 64, got 50"
EXISTS = "README.md exists; give --force to overwrite it"
JSON = "benchmarks/results/h200/sel_rivals.json"  # no tokenizer
NO_TORCHRUN = "divides a training over processes of torchrun, which did not start this one"
WRONG = {
    "backend": "No such command 'backend'. Did you mean 'backends'? (known: doctor, inspect,",
    "bench run": "No such command 'run' (known: decode, compare, report)",
    "backends list --phase decod": "--phase: 'decod' is not one of 'prefill', 'decode'",
    "backends list --gpu a1000": f"--gpu: {GPU}",
    "backends list --gpu a100 --no-probe": "leave out --no-probe",
    "backends show sdpa --gpu sm_81": "unknown GPU 'sm_81'; did you mean 'sm_8",
    "backends list --json /no/such/x": f"--json {NO_FOLDER}",
    "backends show sdpa --json packages": f"--json {IS_FOLDER}",
    "backends explain --json README.md": f"--json {EXISTS}",
    "backends show sdpaa": "NAME: unknown backend 'sdpaa'; did you mean 'sdpa'?",
    "backends explain --sel nope": f"--sel: {BACKEND}",
    "backends explain --dtype fp17": DTYPE,
    "backends explain --device gpu": DEVICE,
    "backends explain --gpu a1000": GPU,
    "backends explain --gpu ''": "unknown GPU ''",
    "bench --shape 2/1/64 --shape=4/1/64": "--shape is given 2 times: give it once",
    "backends explain --gpu a100 --device cpu": "leave out --device cpu",
    "backends explain --nonsense": "nonsense",
    "backends explain --head-dim 6.5": "--head-dim must be a valid integer, got '6.5'",
    "backends explain --n-heads 7": "--n-heads must be a multiple of --n-kv-heads: 7 query heads",
    "backends explain --phase decode --page-size 50": PAGES,
    "backends explain --dtype bf16,fp16": "--dtype must be one dtype, got bfloat16, float16",
    "backends explain --page-size 64": "--page-size: only with --phase decode; leave it out",
    "backends explain --kv-dtype int8": "--kv-dtype: only with --phase decode; leave it out",
    "backends explain --phase decode --grad": "--grad: only with --phase prefill; leave it out",
    "backends explain --head-dim 0": "--head-dim must be greater than or equal to 1, got '0'",
    "backends explain --seq-len ''": "--seq-len: '' is not a number of tokens from 0",
    "doctor --json /no/such/x": f"--json {NO_FOLDER}",
    "doctor --json /proc/x": f"--json {READ_ONLY}",
    "doctor --json ''": "--json must be a path, got ''",
    "verify --sel nope": f"--sel: {BACKEND}",
    "verify --sel": "Option '--sel' requires an argument; choose the backend of each slot with",
    "backends new 1abc o": "words of lower-case letters and digits joined by '-', which begin with",
    "verify --json /no/such/x": f"--json {NO_FOLDER}",
    "verify --json /proc/x": f"--json {READ_ONLY}",
    "verify --dtype fp17": DTYPE,
    "verify --device gpu": "--device: 'gpu' is not one of 'auto', 'cpu', 'cuda'",
    "verify --case 'win tokn=5'": "nsa: --case: win has no key 'tokn'; did you mean 'tokens'?",
    "verify --case win --dtype bf16 --shard 1/4": "--dtype, --shard: not with --case; leave them",
    "verify --dtype ''": "--dtype must be one of bfloat16 (bf16), float16 (fp16)",
    "verify --shard 5/4": "such as 1/4",
    "verify --shard 0/2": "such as 1/4",
    "verify --shard 2": "such as 1/4",
    "verify --shard 1/x": "such as 1/4",
    "verify --shard=-1/2": "such as 1/4",
    "bench --combo sel=nope": f"--combo: {BACKEND}",
    "bench --json packages": f"--json {IS_FOLDER}",
    "bench --html /no/such/x": f"--html {NO_FOLDER}",
    "bench --png README.md": f"--png {EXISTS}",
    "bench --svg /proc/x": f"--svg {READ_ONLY}",
    "bench decode --html packages": f"--html {IS_FOLDER}",
    "bench report a --svg packages": f"--svg {IS_FOLDER}",
    "bench --png o.jpg": "--png o.jpg names a file of another format; give a path that ends in",
    "bench report a --html o.PNG": "--html o.PNG names a file of another format; give a path that",
    "bench report a --svg -": "--svg -: only --json writes to standard output; give another path",
    "bench report ''": "FILE must be a path, got ''",
    "bench compare a ''": "NEW must be a path, got ''",
    "backends new toy ''": "DIR must be a path, got ''",
    "backends list --safe": "--safe; give it before the command: nsa --safe ... (try",
    "bench --json o --html ./o": "--json and --html are the same file o; give another one",
    "bench report a --png o --svg o": "--png and --svg are the same file o; give another one",
    "bench --budget inf": "--budget must be finite, got inf",
    "bench --time-limit=-inf": "--time-limit must be greater than or equal to 1, got '-inf'",
    "--plugin-limit inf doctor": "--plugin-limit must be finite, got inf",
    "bench --combo slot=sdpa": f"--combo 'slot=sdpa': {SLOT} (known: cmp, select, sel, win,",
    "bench --shape 12/5": SHAPE,
    "bench --shape ''": SHAPE,
    "bench --length 2q": TOKENS,
    "bench --phase forwrd": "got 'forwrd'; did you mean 'forward'?",
    "bench --phase decode,forward": "nsa bench decode times steps of decoding",
    "bench --threads 2 decode": "--threads: not before decode",
    "bench --json x decode": "--json: not before decode",
    "bench decode --preset huge": "--preset: 'huge' is not one of 'quick', 'full'",
    "bench decode --page-size 64": "--page-size: give --shape or --length with it",
    "bench --dtype fp17": DTYPE,
    "bench --device gpu": DEVICE,
    "bench --preset fast": "--preset: 'fast' is not one of 'quick', 'full'",
    "bench --blocks 1,2,3": "--blocks must be five integers l,d,l',n,w",
    "bench --rival flaa": "one or several of fla, sfnsa, xunhao, none, got 'flaa'; did you mean",
    "bench --rival none,sfnsa": "--rival none excludes other libraries, got none, sfnsa",
    "bench --rival xunhao": "has the module native_sparse_attention, is not installed",
    "bench --inputs reall": "got 'reall'; did you mean 'real'?",
    "bench --inputs real --checkpoint /no/such": MISSING,
    "bench --text README.md": "--text: only with --inputs real; leave it out",
    "bench decode --combo nope": f"--combo: {BACKEND}",
    "bench decode --shape 12/5": SHAPE,
    "bench decode --shape ''": SHAPE,
    "bench decode --length ''": "--length: '' is not a number of tokens from 1",
    "bench decode --blocks 1": "--blocks must be five integers l,d,l',n,w, got 1",
    "bench decode --dtype fp17": DTYPE,
    "bench decode --length 1k --page-size 50": PAGES,
    "bench decode --batch 2": "--batch: give --shape or --length with it",
    "bench compare /no/such b": MISSING,
    "bench report pyproject.toml": "pyproject.toml is not JSON",
    "tune --shape 12/5": SHAPE,
    "tune --length 2q": TOKENS,
    "tune --blocks 32,15,64,16,512": "--blocks: compress_stride must divide compress_block_size",
    "tune --dtype fp17": DTYPE,
    "tune --show --reset": "--show prints what --reset deletes: pass one of them",
    "tune --reset --shape 2/1/8 --dtype bf16": "--dtype, --shape: not with --reset, which is for",
    "tune --show --seed 0": "--seed: not with --show, which is for all choices; leave it out",
    "tune --device gpu": DEVICE,
    "train --out o --batch 3 --accumulate 2": "--batch 3 does not divide over --accumulate 2 x 1",
    "train --out=": "--out must be a path, got ''",
    "train --out o --size big": "--size: 'big' is not one of 'tiny', 'toy', 'm7c_125m'",
    "train --out o --attention flash": "--attention: 'flash' is not one of 'nsa', 'dense'",
    "train --out o --dtype fp16": "--dtype: 'fp16' is not one of 'float32', 'bfloat16'",
    "train --out o --parallel dp": "--parallel: 'dp' is not one of 'ddp', 'fsdp'",
    "train --out o --tokenizer /no/such": MISSING,
    "train --out o --tokenizer README.md": "--tokenizer README.md cannot be read as a tokenizer",
    f"train --out o --tokenizer {JSON}": f"--tokenizer {JSON} cannot be read as a tokenizer.json",
    "train --out o --cuda-graph --device cpu": "--cuda-graph needs one process on one GPU, got 1",
    "train --out o --checkpoint /no/such": NO_MODEL,
    "train --out o --backends nope": f"--backends: {BACKEND}",
    "train --out o --device gpu": DEVICE,
    "train --out o --lr nan": "--lr must be finite and > 0, got nan",
    "train --out o --lr 0 --clip 0": "> 0, got 0.0; --clip must be finite and > 0, got",
    "train --out o --weight-decay -1": "--weight-decay must be finite and >= 0, got -1.0",
    "train --out o --data recall --held-out 0.5": "--held-out: only with text",
    f"train --out o --seed {2**63}": "--seed",
    "train --out o --held-out 2": "--held-out must lie between 0 and 1, such as 0.05",
    "train --out /no/such/x": f"--out {NO_FOLDER}",
    "train --out packages": "--out packages is not empty; give --resume to go on with it",
    "train --out packages --resume": "--resume: packages has no saved run, so there is nothing to",
    "train --out packages --resume --batch 4 --lr 1": "--batch, --lr: set by the folder of",
    "train --out README.md": "--out README.md is not a folder; give the path of a folder",
    "train --out /proc/x": "--out /proc/x: no file can be created in /proc: ",
    "train --out o --png packages": f"--png {IS_FOLDER}",
    "train --out o --png p --svg p": "--png and --svg are the same file p; give another one",
    "train --out o --parallel fsdp": f"--parallel fsdp {NO_TORCHRUN}",
    "train --out o --context-parallel 2": f"--context-parallel 2 {NO_TORCHRUN}",
    "train --out o --tensor-parallel 4": f"--tensor-parallel 4 {NO_TORCHRUN}",
    "train --out o --vocab 32": "--vocab: only with uniform and recall",
    "generate --checkpoint packages --max-new-tokens 0": "'0' is not a number of tokens from 1 to",
    "generate --checkpoint packages --prompt a\udcff": "--prompt must be UTF-8, got 'a\\udcff'",
    "generate --checkpoint packages --temperature inf": "--temperature must be finite, got inf",
    "generate --checkpoint /no/such": NO_MODEL,
    "generate --checkpoint packages": "--checkpoint packages has no config.json: give the",
    "convert --out c --checkpoint /no/such": NO_MODEL,
    "convert --out c --checkpoint . --nsa-layers foo": "--nsa-layers must be all, every_4th_dense",
    "convert --out c --checkpoint . --nsa-layers 3-1": "layer numbers such as 0,2,4-7, got '3-1'",
    "inspect --out i --text /no/such": MISSING,
    "inspect --out i --text README.md --checkpoint /no/such": NO_MODEL,
    "inspect --out i --text README.md --dtype fp17": DTYPE,
    "inspect --out i --text README.md --backends nope": BACKEND,
    "inspect --out i --text README.md --device gpu": DEVICE,
    "inspect --out /no/such/x --text README.md": f"--out {NO_FOLDER}",
    "inspect --out packages --text README.md": "--out packages is not empty: it holds",
}


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str]]:
    """The exit code and the error of each command."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([shlex.split(command) for command in WRONG]),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(WRONG, json.loads(done.stdout)))


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_argument_is_refused_before_torch_loads(answers, command) -> None:
    code, err = answers[command]
    assert code == (3 if err.endswith("is not installed\n") else 2), err
    assert WRONG[command] in err
    assert err.count("\n") == 1
