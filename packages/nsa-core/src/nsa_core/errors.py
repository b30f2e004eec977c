"""The exceptions of this library.

Every message names the argument and the value that caused the error, and how to fix it.
"""


class NSAError(Exception):
    """Base class of all errors that this library raises deliberately.

    It is raised directly only if a backend breaks the contract at run time: a kernel raised an
    exception, or returned a tensor of the wrong shape, dtype or device. The message names the
    backend and the slot.
    """


class InvalidInput(NSAError, ValueError):
    """An argument is invalid for every backend; the message names every invalid value."""


class Unsupported(NSAError, NotImplementedError):
    """No eligible backend supports the request; the message lists each backend with its reasons."""


class BackendUnavailable(NSAError, RuntimeError):
    """The backend is known but cannot run here: no GPU, a missing package, a broken plugin.

    Attributes:
        nothing_usable: True if no backend at all is usable, not only the requested one.
    """

    nothing_usable = False
