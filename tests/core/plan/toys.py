"""Toy plugins, valid and faulty, each in a distribution of its own that the tests install."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

from nsa_core.contract import API_VERSION

MAJOR, MINOR = API_VERSION

# A valid backend of one slot, with a probe and a workspace function.
GOOD = """
    from nsa_core.contract import BackendSpec, Reason, SlotSpec, hookimpl

    @hookimpl
    def nsa_register_backends():
        slot = SlotSpec("{package}:forward", "{package}:backward", workspace="{package}:workspace")
        probe = "{package}:{probe}"
        return BackendSpec("{name}", {version}, {{"combine": slot}}, probe, priority={priority})

    def probe(request):
        if request.device == "cpu":
            return []
        return [Reason("no_gpu", "needs cpu, got " + request.device, "use sdpa")]

    def probe_raises(request):
        return 1 // 0

    def forward(gates, o_cmp, o_sel, o_win, *, call):
        g = gates.to(o_cmp.dtype)
        return g[..., :1] * o_cmp + g[..., 1:2] * o_sel + g[..., 2:] * o_win

    def backward(do, gates, o_cmp, o_sel, o_win, *, call):
        g = gates.to(do.dtype)
        dg = [(do * o).sum(-1) for o in (o_cmp, o_sel, o_win)]
        import torch
        dgates = torch.stack(dg, -1).to(gates.dtype)
        return dgates, g[..., :1] * do, g[..., 1:2] * do, g[..., 2:] * do

    def workspace(request):
        return request.batch * request.seq_len
"""
HOOK = (
    "from nsa_core.contract import BackendSpec, Reason, SlotSpec, Unavailable,"
    " hookimpl\n@hookimpl\n"
)


def good(
    name: str,
    package: str,
    version: str = str(API_VERSION),
    probe: str = "probe",
    priority: int = 5,
) -> str:
    return GOOD.format(name=name, package=package, version=version, probe=probe, priority=priority)


# distribution -> (name of its entry point, source of its only module)
SOURCES = {
    "toy-import-error": (
        "toy-import-error",
        "raise ImportError('libtoy.so.3: cannot open shared object file')",
    ),
    "toy-needs-package": ("toy-needs-package", "import toy_absent_dependency.kernels"),
    "toy-half-installed": ("toy-half-installed", "import toy_half_installed.missing_part"),
    "toy-stale": ("toy-stale", HOOK + "def nsa_register_backends(api_version, device): return []"),
    "toy-other-hook": (
        "toy-other-hook",
        "from nsa_core.contract import hookimpl\n@hookimpl\ndef nsa_fly(): pass",
    ),
    "toy-newer": ("toy-newer", good("toy-newer", "toy_newer", f"({MAJOR}, {MINOR + 7})")),
    "toy-older-major": (
        "toy-older-major",
        good("toy-older-major", "toy_older_major", f"({MAJOR - 1}, 0)"),
    ),
    "toy-twin-one": ("toy-twin", good("toy-twin", "toy_twin_one")),
    "toy-twin-two": ("toy-twin", good("toy_Twin", "toy_twin_two")),
    "toy-probe-raises": (
        "toy-probe-raises",
        good("toy-probe-raises", "toy_probe_raises", probe="probe_raises"),
    ),
    "toy-no-kernel": (
        "toy-no-kernel",
        good("toy-no-kernel", "toy_no_kernel").replace(":forward", ":gone"),
    ),
    "toy-exit-exception": ("toy-exit-exception", "raise SystemExit(5)"),
    "toy-no-hook": ("toy-no-hook", "x = 1"),
    "toy-nonsense": ("toy-nonsense", HOOK + "def nsa_register_backends(): return 3"),
    "toy-unavailable": (
        "toy-unavailable",
        HOOK
        + "def nsa_register_backends(): return Unavailable('toy-unavailable', Reason('no', 'not"
        " today', 'wait'))",
    ),
    "toy-rude": ("toy-rude", "raise RuntimeError('\\x1b[31m[bold red]boo[/]\\r\\n\\u202etxt.exe')"),
    "toy-bad-spec": (
        "toy-bad-spec",
        HOOK + "def nsa_register_backends():\n    slot = SlotSpec(forward='no colon', backward=3,"
        " deterministic=1, reads_boundaries=None)\n    return BackendSpec('toy-bad-spec',"
        f" {API_VERSION}, {{'rope': slot, 'cmp': slot, 'win': 4}}, 'x:y', '9')",
    ),
}
DEADLY = {
    "toy-segfault": ("toy-segfault", "import ctypes\nctypes.string_at(0)"),
    "toy-exits": ("toy-exits", "import os\nos._exit(7)"),
    "toy-exits-zero": ("toy-exits-zero", "import os\nos._exit(0)"),
    "toy-hangs": (
        "toy-hangs",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
    ),
}
REFUSED = {  # distribution -> (status, text that its reason contains)
    "toy-import-error": ("broken", "ImportError: libtoy.so.3: cannot open shared object file"),
    "toy-needs-package": ("unavailable", "No module named 'toy_absent_dependency'"),
    "toy-half-installed": ("broken", "toy_half_installed"),
    "toy-stale": ("incompatible", "device"),
    "toy-other-hook": ("incompatible", "nsa_fly"),
    "toy-newer": (
        "incompatible",
        f"written for contract {MAJOR}.{MINOR + 7}, this nsa-core has {MAJOR}.{MINOR}",
    ),
    "toy-older-major": (
        "incompatible",
        f"written for contract {MAJOR - 1}.0, this nsa-core has {MAJOR}.{MINOR}",
    ),
    "toy-exit-exception": ("broken", "SystemExit: 5"),
    "toy-no-hook": ("broken", "registered nothing"),
    "toy-nonsense": ("broken", "returned int"),
    "toy-unavailable": ("unavailable", "not today"),
    "toy-rude": ("broken", "RuntimeError: \\x1b[31m[bold red]boo[/] \\u202etxt.exe"),
    "toy-bad-spec": ("broken", "unknown key 'rope' in slots"),
    "toy-segfault": ("broken", "SIGSEGV"),
    "toy-exits": ("broken", "exit status 7"),
    "toy-exits-zero": ("broken", "exit status 0"),
    "toy-hangs": ("broken", "within"),
}


def build_and_install(work: pathlib.Path, target: pathlib.Path, name: str, priority: int) -> None:
    """Build a wheel with setuptools and install it with pip, offline."""
    package = name.replace("-", "_")
    project = work / name
    project.mkdir()
    (project / f"{package}.py").write_text(
        textwrap.dedent(good(name, package, priority=priority)), encoding="utf-8"
    )
    (project / "pyproject.toml").write_text(
        textwrap.dedent(f"""
            [build-system]
            requires = ["setuptools>=77"]
            build-backend = "setuptools.build_meta"
            [project]
            name = "{name}"
            version = "3.1"
            [project.entry-points."nsa.backends"]
            {name} = "{package}"
            [tool.setuptools]
            py-modules = ["{package}"]
            """)
    )
    offline = [
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-q",
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(project)],
        check=True,
        capture_output=True,
        text=True,
    )
