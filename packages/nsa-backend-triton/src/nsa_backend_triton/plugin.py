"""Registers the backend ``triton`` as unavailable: this version holds no kernels."""

from nsa_core.contract import Reason, Unavailable, hookimpl


@hookimpl
def nsa_register_backends() -> Unavailable:
    """The reason why ``triton`` cannot run."""
    return Unavailable("triton", Reason("not_implemented", "kernels not implemented yet", "use sdpa"))
