"""A kernel whose module ends its process or hangs when it is imported, as its environment says."""

from __future__ import annotations

import ctypes
import os
import time

_ACTIONS = {
    "crash": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(0),
    "hang": lambda: time.sleep(600),
}
_ACTIONS[os.environ["DEADLY_MODULE"]]()
