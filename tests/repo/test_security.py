"""Each sentence of SECURITY.md that promises something has tests, named here in its order."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from installed import install

HERE = "tests/repo/test_security.py"
PLUGINS = "tests/core/plan/test_registry_plugins.py"
HOSTILE = "tests/cli/test_hostile_plugins.py"
UNWRITTEN = "tests/cli/test_unwritten.py"
NETWORK = "tests/repo/test_package_readmes.py"
NO_PROMISE: tuple[str, ...] = ()  # the sentence explains or asks
FOLDER = "tests/cli/test_strange_folder.py"
DAMAGED = f"{FOLDER}::test_a_damaged_folder_is_one_sentence_or_has_no_effect"
OUTSIDE = f"{FOLDER}::test_no_door_opens_what_is_no_file_of_the_folder"
TRAIN = "tests/models/test_train_command.py"
RESUMED = f"{TRAIN}::test_a_resumed_run_opens_the_data_that_its_folder_names"
# Sentence -> ids of its tests.
TESTS: dict[str, tuple[str, ...]] = {
    "Installing and using a backend runs its code with your rights, and no setting changes"
    " that.": NO_PROMISE,
    "`nsa backends list --no-probe` shows name, distribution and version of every plugin, and runs"
    " no plugin code.": (
        f"{HERE}::test_a_list_without_probe_shows_metadata_and_runs_no_plugin",
        "tests/cli/test_backends_commands.py::test_list_without_probe_reads_metadata_only",
    ),
    "`nsa --safe` loads only the backends of this project.": (
        f"{PLUGINS}::test_safe_mode_imports_no_third_party_code",
        "tests/cli/test_backends_commands.py::test_safe_mode_reaches_the_registry",
    ),
    "`NSA_PLUGINS` names the only third-party plugins to load, and `NSA_DISABLE_PLUGINS` plugins"
    " not to load ([values](docs/reference/environment.md)).": (
        f"{PLUGINS}::test_environment_variables_disable_plugins_by_name_or_distribution",
        "tests/repo/test_environment.py::test_environment_variables_are_documented_in_one_table",
    ),
    "The commands that list, verify and time backends run each third-party plugin in child"
    " processes, under a time limit.": (
        f"{PLUGINS}::test_row_57_a_plugin_in_a_child_is_planned_without_its_kernels_here",
        f"{HOSTILE}::test_row_57_list_and_explain_name_each_plugin",
        f"{HOSTILE}::test_verify_fails_the_rows_of_a_faulty_kernel_and_runs_the_others",
        f"{HOSTILE}::test_row_57_verify_and_tune_run_the_other_backends",
        f"{HOSTILE}::test_bench_fails_the_cells_of_a_faulty_kernel_and_times_the_others",
    ),
    "This protects against a crash or a hang, not against malicious code.": (
        f"{HOSTILE}::test_row_57_list_and_explain_name_each_plugin",
        f"{HOSTILE}::test_verify_fails_the_rows_of_a_faulty_kernel_and_runs_the_others",
    ),
    "If two plugins claim the same name, neither is loaded, so no plugin can replace a backend by"
    " taking its name.": (
        f"{PLUGINS}::test_row_58_name_conflict_names_both_distributions",
        f"{PLUGINS}::test_row_58_first_party_backend_is_not_preferred_in_a_name_conflict",
    ),
    "Text from a plugin, a result file or the file of `nsa tune` is printed without control"
    " characters or markup.": (
        f"{HOSTILE}::test_text_of_a_plugin_is_printed_without_control_characters",
        "tests/cli/test_output.py::test_texts_and_tables_escape_control_characters_and_markup",
        "tests/bench/test_bench_result_limits.py"
        "::test_a_hostile_value_gives_a_sentence_or_plain_text",
        "tests/bench/test_bench_result_limits.py"
        "::test_any_hostile_value_gives_a_sentence_or_a_plain_page",
        "tests/bench/test_tune.py::test_saved_texts_are_printed_without_control_characters",
    ),
    "Weights and results are read and written as safetensors or JSON, never as pickle.": (
        f"{HERE}::test_no_module_unpickles_a_file",
    ),
    "A file is written completely or not at all.": (
        "tests/cli/test_output.py::test_row_60_files_are_written_completely_or_not_at_all",
        f"{UNWRITTEN}::test_a_new_backend_that_cannot_be_written_leaves_nothing",
    ),
    "A command overwrites an existing file only with `--force`; `nsa train --resume` and `nsa tune`"
    " go on with files of their own.": (
        f"{UNWRITTEN}::test_an_existing_file_is_overwritten_with_force_only",
        f"{UNWRITTEN}::test_every_option_that_writes_a_file_is_tested",
        f"{UNWRITTEN}::test_a_new_backend_needs_an_empty_folder",
        "tests/bench/test_tune.py::test_a_corrupt_file_is_reported_and_replaced",
    ),
    "`nsa generate`, `nsa convert`, `nsa inspect` and `nsa train` read a model folder as data,"
    " whoever made it:": (DAMAGED,),
    "They load no code, kernel or adapter that the folder names.": (DAMAGED,),
    "A configuration with `auto_map` is an error, and so is a kernel of a hub in"
    " `attn_implementation`, also in `from_pretrained` for nsa_llama, nsa_qwen2 and nsa_qwen3.": (
        DAMAGED,
        f"{FOLDER}::test_a_model_of_transformers_loads_no_kernel",
    ),
    "Otherwise `from_pretrained` has the protection of transformers: leave `trust_remote_code`"
    " out.": NO_PROMISE,
    "They open plain files inside the folder only: a link out of it, a pipe or a device is an"
    " error.": (OUTSIDE,),
    "`nsa train` writes into no folder that has one.": (
        f"{FOLDER}::test_a_resumed_run_writes_through_nothing",
    ),
    "They compare types, sizes and the shapes of all tensors before they allocate memory for the"
    " model.": (
        DAMAGED,
        f"{FOLDER}::test_a_value_of_any_type_in_any_field_of_a_config_is_one_sentence",
        f"{FOLDER}::test_a_value_of_another_type_in_a_training_is_one_sentence",
    ),
    "The digests of a folder show damage.": (
        f"{TRAIN}::test_an_altered_run_is_refused_by_every_command",
    ),
    "They are no signature, because whoever can write the folder can write them.": NO_PROMISE,
    "The folder of a run names the local file or data set of the Hub that `nsa train --resume`"
    " opens.": (RESUMED,),
    "No import and no command opens a network connection, with two exceptions:": (
        f"{NETWORK}::test_only_the_exceptions_of_the_security_page_use_the_network",
        f"{HERE}::test_imports_and_commands_open_no_connection",
    ),
    "`nsa train --data fineweb-edu` and `--data hf:NAME`, and `--resume` of such a run, stream a"
    " data set from Hugging Face through the library `datasets`, which reads its own settings and"
    " credentials.": (
        "tests/models/test_lm_corpus.py::test_a_data_set_of_parquet_is_read_by_row_group",
        RESUMED,
    ),
    "Under `torchrun`, the processes of `nsa train` connect to each other through"
    " `torch.distributed`.": (
        "tests/models/test_lm_parallel.py::test_an_end_is_named_and_the_run_goes_on_after_it",
    ),
    "Commands read models from local folders and download nothing.": (DAMAGED, OUTSIDE),
    "The Content-Security-Policy of the HTML pages of `nsa bench` forbids every request.": (
        "tests/bench/test_bench_page.py::test_the_page_is_one_file_that_may_not_load_anything",
    ),
    "The library checks shape, dtype and device of each tensor before a backend receives it.": (
        "tests/core/layer/test_wrong_calls.py::test_the_error_names_the_argument_and_the_fix",
    ),
    "It does not read values on the GPU: there, a malformed `cu_seqlens` gives wrong numbers, but"
    " no access outside the tensors.": (
        "tests/core/layer/test_refused.py::test_boundaries_on_a_gpu_are_read_with_nsa_check_only",
        "tests/gpu/test_gpu_block_attention.py::test_forward_and_backward_do_not_synchronise",
        "tests/gpu/test_gpu_triton.py::test_no_synchronisation",
        "tests/triton/interpreted/interpreted_span.py"
        "::test_malformed_boundaries_stay_inside_the_tensors",
        "tests/triton/interpreted/interpreted_sel_lists.py"
        "::test_malformed_boundaries_lead_to_no_access_outside_a_tensor",
        "tests/sdpa/test_sdpa_tiles.py::test_malformed_cu_seqlens_cause_no_invalid_access",
        "tests/fa2/test_fa2_slots.py::test_row_17_malformed_boundaries_cause_no_invalid_access",
        "tests/core/layer/test_compress.py::test_row_17_malformed_boundaries_stay_in_bounds",
    ),
    "`NSA_CHECK=1` checks it.": (
        "tests/core/layer/test_refused.py::test_boundaries_on_a_gpu_are_read_with_nsa_check_only",
    ),
    "Block indices out of range have no effect.": (
        "tests/core/layer/test_attention.py"
        "::test_row_30_blocks_in_any_order_and_dtype_with_harmless_extras",
        "tests/core/block/test_block_attention.py::test_output_and_gradients_match_the_oracle",
        "tests/triton/interpreted/interpreted_decode.py"
        "::test_sel_accepts_unsorted_repeated_and_invalid_blocks",
    ),
    'Report a vulnerability privately, through the "Report a vulnerability" button of the'
    " repository's Security tab, not in a public issue.": NO_PROMISE,
    "Say what an attacker gains and how to reproduce it.": NO_PROMISE,
    "You get an answer within a week.": NO_PROMISE,
    "Fixes go into the latest release.": NO_PROMISE,
}


def sentences(text: str) -> list[str]:
    """Return the sentences of a page without its headings; an item of a list is a paragraph."""
    blocks = re.split(r"\n\s*\n|\n(?=- )", re.sub(r"(?m)^#.*$", "", text))
    paragraphs = [re.sub(r"^- ", "", " ".join(block.split())) for block in blocks]
    return [
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.:])\s+(?=[A-Z`])", paragraph)
        if sentence
    ]


def test_every_sentence_is_in_the_table_with_tests_that_exist(repo):
    written = sentences(repo.text("SECURITY.md"))
    assert written == list(TESTS)
    named = {test for tests in TESTS.values() for test in tests}
    defined = {
        f"{file}::{node.name}"
        for file in {test.split("::")[0] for test in named}
        for node in ast.walk(ast.parse(repo.text(file)))
        if isinstance(node, ast.FunctionDef)
    }
    assert named <= defined


def test_a_list_without_probe_shows_metadata_and_runs_no_plugin(nsa, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    source = f"open({str(trace)!r}, 'w').close()"
    install(tmp_path, "toy-trap", source, point="trap", version="1.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = nsa("backends", "list", "--no-probe")
    (line,) = (line for line in done.out.splitlines() if line.startswith("trap "))
    assert "1.5" in line
    assert "toy-trap" in line
    assert not trace.exists()
    nsa("backends", "list")
    assert trace.exists()


# Modules and functions that run code of the file that they read.
UNPICKLES = re.compile(
    r"(pickle|dill|joblib|marshal|shelve|cloudpickle)\.(load|loads|Unpickler|open)"
    r"|torch\.(load|save)|(np|numpy)\.load|Unpickler|yaml\.(load|unsafe_load)"
)


def unpickling_calls(tree: ast.AST) -> list[str]:
    """Return the calls that read or write a pickle."""
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if UNPICKLES.fullmatch(call)]


def test_no_module_unpickles_a_file(repo):
    found = {name: unpickling_calls(tree) for name, tree in repo.python("packages").items()}
    assert not {name: calls for name, calls in found.items() if calls}
    for call in ("torch.load(f)", "pickle.loads(b)", "np.load(f)", "torch.save(x, f)"):
        assert unpickling_calls(ast.parse(call))


RECORD_CONNECTIONS = """
import os, sys
def record(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind"):
        address = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        if event == "socket.getaddrinfo" or isinstance(address, tuple):  # no path of a local socket
            with open(os.environ["CONNECTIONS"], "a") as file:
                file.write(f"{event} {address} {sys.argv}\\n")
sys.addaudithook(record)
"""
IMPORTS = """
import importlib, pkgutil
for name in ("nsa_core", "nsa_verify", "nsa_bench", "nsa_cli", "nsa_backend_sdpa"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
TINY = ("--shape", "2/1/8", "--blocks", "8,4,16,4,16", "--length", "48", "--device", "cpu")
COMMANDS: dict[str, tuple[str, ...]] = {
    "imports": ("-c", IMPORTS),
    "list": ("-m", "nsa_cli", "backends", "list"),
    "doctor": ("-m", "nsa_cli", "doctor"),
    "verify": ("-m", "nsa_cli", "verify", "--device", "cpu", "--case", "win w=3 tokens=5"),
    "bench": ("-m", "nsa_cli", "bench", *TINY, "--budget", "0.001", "--html", "page.html"),
    "tune": ("-m", "nsa_cli", "tune", *TINY, "--budget", "0.001"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_imports_and_commands_open_no_connection(command, tmp_path):
    """An audit hook of Python sees each connection, in child processes too."""
    site, trace = tmp_path / "site", tmp_path / "connections"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RECORD_CONNECTIONS)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "CONNECTIONS": str(trace),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert not trace.exists(), trace.read_text()
    run("-c", "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('127.0.0.1', 9))")
    assert trace.exists(), "the hook sees no connection"
