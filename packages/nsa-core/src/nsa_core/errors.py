"""The three errors of this library; every message names the value at fault and what would work."""


class NSAError(Exception):
    """Base of every error this library raises on purpose.

    Raised itself only when a backend breaks its contract while running: a kernel raised, or
    returned a tensor of the wrong shape, dtype or device. The message names the backend and the
    branch.
    """


class InvalidInput(NSAError, ValueError):
    """The request is wrong for every backend; the message names every offending value."""


class Unsupported(NSAError, NotImplementedError):
    """No candidate takes the request; the message has a line per backend with its reasons."""


class BackendUnavailable(NSAError, RuntimeError):
    """The backend is known but cannot run here: no GPU, package missing, plugin broken.

    Attributes:
        nothing_usable: there is no backend at all, not only not the one asked for.
    """

    nothing_usable = False
