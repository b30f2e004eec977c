"""Run `nsa`, also as `python -m nsa_cli`."""

from __future__ import annotations

import sys
import warnings

_COMPILER = r"cutlass\."  # of FlashAttention-4; it warns of an argument at each compilation
_NO_NUMPY = "Failed to initialize NumPy"  # torch warns of this at its import; nothing here needs it


def main() -> None:
    """Run `nsa`, and end quietly if Ctrl-C interrupts its imports."""
    warnings.filterwarnings("ignore", _NO_NUMPY)
    warnings.filterwarnings("ignore", category=UserWarning, module=_COMPILER)
    sys.warnoptions.append(f"ignore:{_NO_NUMPY}")  # for worker processes
    try:
        from nsa_cli.app import main as run
        from nsa_cli.output import format_warning
    except KeyboardInterrupt:
        print("nsa: interrupted by SIGINT", file=sys.stderr)
        raise SystemExit(130) from None
    warnings.formatwarning = format_warning
    run()


if __name__ == "__main__":  # worker processes import this file again under another name
    main()
