"""READMEs of the packages run, and only the exceptions of SECURITY.md use the network."""

from __future__ import annotations

import ast
import re
import shlex

import pytest

from test_release import PACKAGES

NETWORK = re.compile(
    r"^(socket|ssl|http|ftplib|smtplib|imaplib|xmlrpc|asyncio|webbrowser|requests|httpx|aiohttp"
    r"|urllib3|urllib\.request|datasets|huggingface_hub|transformers|torch\.hub)(\.|$)"
)  # these open connections; urllib.parse opens none
# Modules that a file or folder may use, by the exceptions in SECURITY.md.
ALLOWED = {
    "nsa-models/src/nsa_models/lm/sources.py": {"datasets"},
    "nsa-models/src/nsa_models/lm/": {"torch.distributed"},
    "nsa-core/src/nsa_core/parallel/": {"torch.distributed"},
    "nsa-models/src/nsa_models/hf/": {"transformers"},
    # Classes and functions of transformers that open no connection.
    "nsa-models/src/nsa_models/lm/config_json.py": {"transformers"},
    "nsa-cli/src/nsa_cli/convert.py": {"transformers"},
    "nsa-cli/src/nsa_cli/generate.py": {"transformers"},
    "nsa-vllm/src/nsa_vllm/plugin.py": {
        *("transformers", "transformers.AutoConfig", "transformers.PreTrainedConfig")
    },
}


@pytest.mark.few_cases(
    "nsa-backend-fa2",
    "nsa-backend-sdpa",
    "nsa-backend-triton",
    "nsa-bench",
    "nsa-core",
    "nsa-models",
)
@pytest.mark.parametrize("package", PACKAGES)
def test_the_readme_of_a_package_says_how_to_install_and_its_code_runs(
    package, repo, nsa, monkeypatch
):
    monkeypatch.chdir(repo.root)
    text = repo.text(f"packages/{package}/README.md")
    assert text.startswith(f"# {package}\n")
    assert "```sh\npip install ./packages/*\n```" in text
    assert "](https://OWNER.github.io/native-sparse-attention/" in text
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert programs or blocks
    for code in programs:
        exec(compile(code, f"{package}/README.md", "exec"), {"__name__": "readme"})
    for line in "".join(blocks).splitlines():
        program, *words = shlex.split(line)
        assert program == "nsa"
        result = nsa(*words)
        assert (result.code, bool(result.out)) == (0, True), result


def test_links_of_package_readmes_name_pages_of_the_site(repo):
    errors, checked = [], 0
    for package in PACKAGES:
        text = repo.text(f"packages/{package}/README.md")
        for page in re.findall(r"OWNER\.github\.io/native-sparse-attention/([\w/-]+)/\)", text):
            checked += 1
            if not (repo.root / "docs" / f"{page}.md").is_file():
                errors.append(f"{package}: {page}")
    assert not errors
    assert checked > 15


def network_uses(tree: ast.AST) -> set[str]:
    """Return the modules that connect, imported by statement or by name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function.endswith(("require_module", "import_module", "__import__")) and node.args:
                names.add(str(getattr(node.args[0], "value", "")))
            if function.endswith("init_process_group"):
                names.add("torch.distributed")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.hub":
            names.add("torch.hub")
    return {name for name in names if NETWORK.match(name) or name == "torch.distributed"}


def reads_a_hub(tree: ast.AST) -> list[str]:
    """Return the calls of from_pretrained that may download.

    A call is safe if it reads local files only, or gets its weights in place of a name.
    """
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".from_pretrained")
        and not (node.args and ast.unparse(node.args[0]) == "None")
        and not any(
            k.arg == "local_files_only" and ast.unparse(k.value) == "True" for k in node.keywords
        )
    ]


@pytest.mark.slow
def test_only_the_exceptions_of_the_security_page_use_the_network(repo):
    trees = repo.python("packages")
    errors, unused = [], {(place, root) for place, roots in ALLOWED.items() for root in roots}
    for name, tree in trees.items():
        for module in network_uses(tree):
            exceptions = {
                (place, root)
                for place, roots in ALLOWED.items()
                for root in roots
                if name.startswith(f"packages/{place}") and f"{module}.".startswith(f"{root}.")
            }
            unused -= exceptions
            if not exceptions:
                errors.append(f"{name} uses {module}")
    errors += [f"{name}: {call}" for name, tree in trees.items() for call in reads_a_hub(tree)]
    assert not errors
    assert not unused


@pytest.mark.parametrize(
    "line",
    [
        "import socket",
        "from urllib import request",
        "import http.client as c",
        "require_module('datasets', '', '')",
        "import torch\ntorch.hub.load_state_dict_from_url(url)",
        "dist.init_process_group()",
    ],
)
def test_a_use_of_the_network_is_detected(line):
    assert network_uses(ast.parse(line))


def test_a_download_of_a_checkpoint_is_detected():
    local = ast.parse("AutoModel.from_pretrained(x, local_files_only=True)")
    assert not reads_a_hub(local)
    assert reads_a_hub(ast.parse("AutoModel.from_pretrained(x)"))
    assert reads_a_hub(ast.parse("AutoModel.from_pretrained(x, local_files_only=False)"))
