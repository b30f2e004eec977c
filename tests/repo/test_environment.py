"""The packages read three environment variables, which one page documents."""

from __future__ import annotations

import re

VARIABLES = {"NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "NSA_CHECK"}
# Conventions of a platform and of torchrun, not settings of ours.
PLATFORM = {"XDG_CACHE_HOME", "TORCHELASTIC_RUN_ID"}


def variables_read(text: str) -> list[str]:
    """Return the variable of each line that uses the environment; "?" if the line names none."""
    lines = [line for line in text.splitlines() if re.search(r"\b(environb?|getenvb?)\b", line)]
    # setdefault sets a variable for another library.
    reads = [line for line in lines if "environ.setdefault(" not in line]
    return [name for line in reads for name in re.findall(r'"([A-Z_]+)"', line) or ["?"]]


def test_only_three_environment_variables_are_read(repo):
    read = {name: {*variables_read(repo.text(name))} for name in repo.python("packages")}
    others = {name: names - VARIABLES - PLATFORM for name, names in read.items()}
    assert not {name: names for name, names in others.items() if names}
    assert set().union(*read.values()) >= VARIABLES, "documented, but never read"


def test_every_form_of_a_read_is_seen():
    forms = (
        'os.environ["NSA_X"]',
        'os.environ.get("NSA_X", "")',
        'os.getenv("NSA_X")',
        '"NSA_X" in os.environ',
    )
    assert [variables_read(form) for form in forms] == [["NSA_X"]] * len(forms)
    hidden = ("os.environ[name]", "from os import environ", "for name in os.environ: ...")
    assert [variables_read(form) for form in hidden] == [["?"]] * len(hidden)


def test_environment_variables_are_documented_in_one_table(repo):
    lines = repo.text("docs/reference/environment.md").splitlines()
    rows = [line.split("|")[1].strip(" `") for line in lines if "| `" in line]
    assert sorted(rows) == sorted(VARIABLES)
