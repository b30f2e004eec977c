"""A process that forks while another thread plans: the child plans, and does not hang."""

import os
import subprocess
import sys
import textwrap

import pytest

import toys
from installed import install

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

# Prints "<situation> <backend of combine>" from a child of each situation.
SCRIPT = """
import os, sys, threading, time
from nsa_core import NSAConfig, resolve
from nsa_core.util import planning_lock

loading = {"plugin": threading.Event(), "kernel": threading.Event()}
held, children = threading.Event(), {}


def plan(situation):
    backend = resolve(NSAConfig(32, 4, 2)).choices["combine"].backend
    # Not print: a child that is forked in the middle of one has half of the line in its buffer.
    os.write(1, f"{situation} {backend}\\n".encode())


def fork(situation):
    children[situation] = os.fork()
    if children[situation] == 0:
        plan(situation)
        os._exit(0)


def hang():
    with planning_lock.planning_lock:
        held.set()
        time.sleep(30)


first = threading.Thread(target=plan, args=["parent"], daemon=True)
first.start()
for situation, event in loading.items():  # the modules of the toy set the events
    assert event.wait(60)
    fork(situation)
first.join()
with planning_lock.planning_lock, planning_lock.planning_lock:
    fork("inside")
planning_lock.WAIT_S = 0.2
threading.Thread(target=hang, daemon=True).start()
assert held.wait(60)
fork("hanging")
end = time.monotonic() + 15
for situation, child in children.items():
    while not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.02)
        if time.monotonic() > end:
            print(situation, "hangs", flush=True)
            os.kill(child, 9)
            os.waitpid(child, 0)
            break
"""
SLOW = """
import sys, time
sys.modules["__main__"].loading["{event}"].set()
time.sleep(1)
"""


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Situation -> the backend that its process planned, of a plugin whose modules are slow."""
    path = tmp_path_factory.mktemp("slow")
    source = textwrap.dedent(toys.good("toy-slow", "toy_slow"))
    kernel = source.split("def forward", 1)[1]
    plugin = source.replace('"toy_slow:forward"', '"toy_kernel:forward"')
    (path / "toy_kernel.py").write_text(SLOW.format(event="kernel") + "\ndef forward" + kernel)
    install(path, "toy-slow", SLOW.format(event="plugin") + plugin)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(path), *sys.path]),
            "XDG_CACHE_HOME": str(path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    "situation",
    [
        "parent",
        "plugin",  # another thread imports the module of a plugin
        "kernel",  # another thread imports the module of a kernel
        "inside",  # the thread that plans forks
        "hanging",  # another thread never ends: the fork goes on, with a lock of its own
    ],
)
def test_the_child_plans(backends: dict[str, str], situation: str) -> None:
    assert backends[situation] == "toy-slow"
