"""Plugins that crash, exit, hang, raise, print or change state, each at one moment."""

from __future__ import annotations

PLUGIN = """
{at_import}
from nsa_backend_sdpa import win
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
@hookimpl
def nsa_register_backends():
    slot = SlotSpec("{kernel}:forward", backward="{name}:backward", decode="{name}:decode")
    return BackendSpec("{name}", (1, 0), {{"win": slot}}, "{name}:probe", {priority})
def probe(request):
    {in_probe}
    return []
def forward(q, k, v, *, call):
    {in_forward}
    return win.forward(q, k, v, call=call)
def backward(*tensors, call):
    return win.backward(*tensors, call=call)
def decode(q, k, v, *, call):
    {in_decode}
    from nsa_backend_sdpa import decode
    return decode.win(q, k, v, call=call)
"""
# Moment -> what a plugin does then -> the reason in the rows of every command.
EXIT, CRASH, HANG = (
    "import os; os._exit(0)",
    "import ctypes; ctypes.string_at(0)",
    ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"),
)
AT_IMPORT = {
    "importexit": (EXIT, "ended its process with exit status 0 while loading"),
    "importcrash": (CRASH, "killed its process with SIGSEGV while loading"),
    "importhang": (HANG, "did not end within 3 s while loading"),
    "importraise": ("raise SystemExit(0)", "SystemExit: 0"),
}
IN_PROBE = {
    "probeexit": (EXIT, "ended its process with exit status 0 in its probe"),
    "probecrash": (CRASH, "killed its process with SIGSEGV in its probe"),
    "probehang": ("import time; time.sleep(600)", "did not end within 5 s in its probe"),
    "proberaise": ("raise KeyboardInterrupt", "its probe raised KeyboardInterrupt"),
}
PRINTED = "standard output belongs to the command"
PRINTS = f"print({PRINTED!r}); __import__('os').write(1, {PRINTED.encode()!r})"
# The number of tokens chooses what the kernel does; other cases are right.
IN_KERNEL = {
    5: ("raise SystemExit(0)", "it raised SystemExit: 0"),
    48: (EXIT, "ended its process with exit status 0 in this check"),
    93: (CRASH, "killed its process with SIGSEGV in this check"),
    24: (PRINTS, f"it printed to standard output: {PRINTED!r}"),
}


def plugin(
    name: str,
    *,
    at_import: str = "",
    in_probe: str = "pass",
    in_forward: str = "pass",
    in_decode: str = "pass",
    kernel: str = "",
    priority: int = -9,
) -> str:
    """Return the source of a plugin of slot win, right but for these statements."""
    return PLUGIN.format(
        name=name,
        at_import=at_import,
        in_probe=in_probe,
        in_forward=in_forward,
        in_decode=in_decode,
        kernel=kernel or name,
        priority=priority,
    )


def faulty(tokens: dict[int, str]) -> str:
    """Return the source of the plugin "faulty", whose kernel misbehaves at these lengths."""
    cases = "; ".join(f"tokens == {n} and exec({what!r})" for n, what in tokens.items())
    return plugin("faulty", in_forward=f"tokens = q.shape[q.dim() - 3]; {cases or 'pass'}")
