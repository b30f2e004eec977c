"""Child processes: how each one ends is the message of its error; others go on."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa_core.errors import InvalidInput, NSAError
from nsa_core.util.child import Child, ChildEnded, announced, printed
from nsa_core.util.interruption import Interruption

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def child() -> Child:
    return Child("backend 'mine'")


def raising(error: BaseException) -> None:
    raise error


def announcing(status: int) -> None:
    with announced(("win",), "slot 'win'"):
        with announced(("inner",), "inner"):
            pass
        os.write(2, b"first\nout of luck\n")
        os._exit(status)


def writing(text: str) -> str:
    os.write(1, b"from C\n")
    print(text)
    return printed()


def starting(file: str) -> None:
    helper = subprocess.Popen(["sleep", "600"])
    Path(file).write_text(f"{os.getpid()} {helper.pid}")
    time.sleep(600)


def unreadable() -> object:
    return lambda: None


def test_a_child_returns_results_and_raises_errors(child: Child) -> None:
    assert child.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(InvalidInput, match=r"^bad$"):
        child.call(raising, InvalidInput("bad"))
    for error, message in (
        (SystemExit(3), "^SystemExit: 3$"),
        (KeyboardInterrupt(), "^KeyboardInterrupt$"),
        (EOFError("own"), "^EOFError: own$"),
    ):
        with pytest.raises(NSAError, match=message):
            child.call(raising, error)
    with pytest.raises(NSAError, match="lambda"):
        child.call(unreadable)
    assert child.call(divmod, 7, 2) == (3, 1)


def test_a_child_captures_what_is_printed(child: Child, capfd) -> None:
    assert child.call(writing, "from Python") == "from C\nfrom Python\n"
    assert child.call(writing, "again") == "from C\nagain\n"
    assert capfd.readouterr() == ("", "")
    assert printed() == ""  # not a child


@pytest.mark.parametrize(
    ("function", "arguments", "how"),
    [
        (os._exit, (0,), "ended its process with exit status 0 while loading"),
        (ctypes.string_at, (0,), "killed its process with SIGSEGV while loading"),
        (os.killpg, (0, signal.SIGKILL), "killed its process with SIGKILL while loading"),
        (time.sleep, (600,), "did not end within 0.5 s while loading"),
    ],
)
def test_the_end_of_a_child_is_its_error_from_then_on(function, arguments, how: str) -> None:
    child = Child("backend 'mine'")
    with pytest.raises(ChildEnded) as caught:
        child.call(function, *arguments, limit_s=0.5, doing="while loading")
    assert str(caught.value) == f"backend 'mine': {how}"
    assert (caught.value.how, caught.value.hung) == (how, "within" in how)
    started = time.monotonic()
    with pytest.raises(ChildEnded, match="while loading"):
        child.call(divmod, 7, 2, doing="in its probe")
    assert child.has_ended
    assert time.monotonic() - started < 5  # it does not wait for LIMIT_S


def test_the_error_names_the_function_that_ran_and_the_last_output() -> None:
    with pytest.raises(ChildEnded) as caught:
        Child("backend 'mine'").call(announcing, 7, doing="in this check")
    how = "ended its process with exit status 7 in this check; its last line of output:"
    assert str(caught.value) == f"slot 'win': {how} 'out of luck'"
    assert caught.value.where == ("win",)


def test_a_signal_ends_the_call() -> None:
    stop = Interruption()
    stop.signal = signal.SIGTERM
    with pytest.raises(ChildEnded, match="was ended by SIGTERM"):
        Child().call(time.sleep, 600, stop=stop)


def test_the_processes_of_a_child_end_with_it(tmp_path: Path) -> None:
    child = Child()
    with pytest.raises(ChildEnded):
        child.call(starting, str(tmp_path / "pids"), limit_s=1.0)
    time.sleep(0.2)
    for pid in (tmp_path / "pids").read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z", pid


def test_a_child_is_not_pickled(child: Child) -> None:
    assert pickle.loads(pickle.dumps([child])) == [None]


def test_children_end_with_their_process(tmp_path: Path) -> None:
    """Also if it is killed; without torch, so that listing starts at once."""
    code = f"""
import os, signal, sys
from nsa_core.util.child import Child
import test_child
children = [Child(), Child()]
file = {str(tmp_path / "pids")!r}
children[0].send(test_child.starting, file)
print(children[1].call(os.getpid), "torch" in sys.modules)
while not (os.path.exists(file) and len(open(file).read().split()) == 2): pass
if sys.argv[1] == "kill": os.kill(os.getpid(), signal.SIGKILL)
"""
    for ending in ("exit", "kill"):
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", code, ending],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == {"exit": 0, "kill": -signal.SIGKILL}[ending], done.stderr
        second, has_torch = done.stdout.split()
        assert has_torch == "False"
        time.sleep(0.3)
        for pid in (second, (tmp_path / "pids").read_text().split()[0]):
            state = Path(f"/proc/{pid}/stat")
            assert not state.exists() or state.read_text().split()[2] == "Z", (ending, pid)
        (tmp_path / "pids").unlink()
