"""READMEs of the packages run, the README's chart is current, and nothing else uses the network."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
import sys

import pytest

from nsa_bench.render.format import number
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
    "nsa-cli/src/nsa_cli/convert.py": {"transformers"},
}


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
        assert len(code.splitlines()) <= 12
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


def lines_of_chart(svg: str) -> list[list[float]]:
    """Return the numbers of every curve inside the axes, rounded to a tenth of a point."""
    curves = re.findall(r'<path d="([^"]+)" clip-path', svg)
    return [[round(float(n), 1) for n in re.findall(r"-?\d+\.?\d*", c)] for c in curves]


def test_the_chart_of_the_readme_is_that_of_the_results(repo, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["readme_figure.py", str(tmp_path)])
    monkeypatch.setattr("sys.path", [*sys.path])  # the script adds a folder
    runpy.run_path(str(repo.root / "docs/scripts/readme_figure.py"), run_name="__main__")
    drawn = lines_of_chart((tmp_path / "lengths.svg").read_text())
    shown = lines_of_chart(repo.text("docs/images/lengths.svg"))
    assert len(shown) > 3
    assert shown == drawn, "run `python docs/scripts/readme_figure.py docs/images`"


def test_the_chart_of_several_gpus_is_that_of_the_results(repo, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["scaling_figure.py", str(tmp_path)])
    monkeypatch.setattr("sys.path", [*sys.path])  # the script adds a folder
    script = repo.root / "docs/scripts/scaling_figure.py"
    names = runpy.run_path(str(script), run_name="__main__")
    drawn = lines_of_chart((tmp_path / "context_parallel.svg").read_text())
    shown = lines_of_chart(repo.text("docs/images/context_parallel.svg"))
    assert len(shown) >= 8
    assert shown == drawn, "run `python docs/scripts/scaling_figure.py docs/images`"
    (words,) = re.findall(r"!\[([^]]+)\]", repo.text("docs/how-to/million-tokens.md"))
    document = json.loads(names["RESULT"].read_text())
    rows = [row for _, line in names["lines_of"](document) for row in line]
    rows = [row for row in rows if row["length"] == 2**18]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    for value in [*map(names["milliseconds"], rows), *map(names["gib"], rows)]:
        assert re.search(rf"\b{re.escape(number(value))}\b", words), value


@pytest.fixture
def figure_script(repo, monkeypatch):
    """The names that docs/scripts/readme_figure.py defines."""
    monkeypatch.setattr("sys.path", [*sys.path])
    return runpy.run_path(str(repo.root / "docs/scripts/readme_figure.py"))


def longest_times(result):
    return {
        m.subject: m.performance.median_ms
        for m in result.measurements
        if (m.shape, m.length, m.phase, m.inputs) == ("64/4/128", 65536, "both", "random")
        and m.performance
    }


def test_the_words_for_the_chart_have_its_numbers(repo, figure_script):
    """A reader who does not see the chart hears the same times."""
    own, older = figure_script["measured"](), figure_script["rehearsed"]()
    assert older is not None
    (alt,) = re.findall(r'alt="([^"]+)"', repo.text("README.md"))
    words = " ".join(alt.split())
    times = longest_times(own)
    assert f"takes {times['auto']:.0f} ms instead of {times['dense cudnn']:.0f} ms at 64k" in words
    ms = longest_times(older)
    own_ms, (dense_ms,) = ms.pop("auto"), ms.values()
    assert (
        f"compiled for the A100 and run on one {figure_script['gpu'](older)}, it takes"
        f" {own_ms:.0f} ms instead of the {dense_ms:.0f} ms of FlashAttention-2 at 64k"
    ) in words
    assert "only this comparison carries over" in words


def test_the_chart_without_a_result_of_the_a100_path_has_one_panel(figure_script, tmp_path):
    """A result of the same GPU comes before that of another one."""
    gpu = tmp_path / "h100"

    def panels():
        return figure_script["chart"](gpu).decode().count("<!-- tokens -->")

    assert figure_script["rehearsed"](gpu) is None
    assert panels() == 1
    source = figure_script["RESULTS"].with_name("h100_as_sm80") / "a100_core_64_4_128.json"
    (tmp_path / "h200_as_sm80").mkdir()
    shutil.copy(source, tmp_path / "h200_as_sm80")
    assert panels() == 2
    document = json.loads(source.read_text())
    for m in document["measurements"]:
        if m["subject"] == "dense flash":
            m["subject"] = "dense flash-attn"
    document["environment"]["device"] = "NVIDIA H100 80GB HBM3 rehearsing sm_80"
    (tmp_path / "h100_as_sm80").mkdir()
    (tmp_path / "h100_as_sm80" / "a100_core_64_4_128.json").write_text(json.dumps(document))
    result = figure_script["rehearsed"](gpu)
    assert figure_script["gpu"](result) == "H100"
    assert {m.subject for m in result.measurements} == {"auto", "dense flash-attn"}
    (crossover,) = (c for c in result.crossovers if c.inputs == "random")
    assert (crossover.subject, crossover.length) == ("auto", 8192)
    assert panels() == 2


def test_the_chart_has_a_white_background(repo):
    """Otherwise black text would stand on the page's own dark background."""
    first = re.search(
        r'<g id="patch_1">\s*<path d="([^"]+)" style="fill: (#\w+)',
        repo.text("docs/images/lengths.svg"),
    )
    assert first is not None
    assert first[2] == "#ffffff"


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
    """Return the calls of from_pretrained that may download, because they name no local files."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".from_pretrained")
        and not any(
            k.arg == "local_files_only" and ast.unparse(k.value) == "True" for k in node.keywords
        )
    ]


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
    "words",
    [
        "`nsa train --data fineweb-edu` and `--data hf:NAME`",
        "Under `torchrun`, the processes of `nsa train`",
        "download nothing",
    ],
)
def test_the_security_page_names_the_exceptions(words, repo):
    assert words in " ".join(repo.text("SECURITY.md").split())


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
