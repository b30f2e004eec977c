"""Nothing needs numpy, so no command and no worker process prints torch's warning that it misses.

The packages' metadata do not require it either; `nox -s wheels` runs the commands without it.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

MISSING = "raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')"
PROGRAM = """
import sys
from nsa_cli.__main__ import main
from nsa_core.util.child import start

sys.argv = ["nsa", "backends", "list"]
try:
    main()
except SystemExit as end:
    assert not end.code
worker = start(__import__, "torch")
worker.join()
assert worker.exitcode == 0
"""


def test_a_missing_numpy_is_not_mentioned(tmp_path: pathlib.Path) -> None:
    (tmp_path / "numpy.py").write_text(MISSING)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "sdpa" in done.stdout
