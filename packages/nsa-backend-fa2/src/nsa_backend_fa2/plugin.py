"""Registers the backend ``fa2`` as unavailable: this version holds no kernels."""

from nsa_core.contract import Reason, Unavailable, hookimpl


@hookimpl
def nsa_register_backends() -> Unavailable:
    """The reason why ``fa2`` cannot run."""
    return Unavailable("fa2", Reason("not_implemented", "kernels not implemented yet", "use sdpa"))
