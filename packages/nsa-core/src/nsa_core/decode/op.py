"""nsa_decode as one operator, for torch.compile.

The operator takes the plan as text, the config and the backend of each slot, so that a graph keeps
no Python object. The plan is resolved in the first run, and cached.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from nsa_core.config import NSAConfig
from nsa_core.decode.chunks import Chunk
from nsa_core.decode.layer_step import Branches, Rope
from nsa_core.decode.pages import LayerPages, PagedKV
from nsa_core.decode.run import DecodeRows, decode, default_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.phi.kinds import Phi, kind_of, make_phi
from nsa_core.layer.plain_linear import PLAIN_TENSORS, are_plain
from nsa_core.layer.unit_linear import Affine
from nsa_core.layout import BlockGeometry
from nsa_core.plan.default_plan import Backends, constant_result, frozen_backends
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.schema import define

_SCHEMA = (
    "decode(Tensor q, Tensor[] keys, Tensor[] values, Tensor gates, Tensor(a!)[] pages,"
    " Tensor[] tables, Tensor[] rows, Tensor[] phi_k, Tensor[] phi_v, Tensor[] rope,"
    " SymInt[] sizes, str plan) -> Tensor"
)


@constant_result  # the check of the names calls plugin code, which must not be traced
def constant_backends(backends: str | Mapping[str, str] | None) -> Backends:
    """Return the result of frozen_backends in a compiled function."""
    return frozen_backends(backends)


def decode_op(
    config: NSAConfig,
    backends: Backends,
    deterministic: bool,
    q: torch.Tensor,
    keys: Branches,
    values: Branches,
    gates: torch.Tensor,
    pages: LayerPages,
    rows: DecodeRows,
    phis: tuple[nn.Module, nn.Module],
    rope: Rope | None,
    max_len: int,
) -> torch.Tensor:
    """Run :func:`nsa_core.decode.run.decode` as one operator.

    Raises:
        InvalidInput: a phi computes something else than the kind ``config.compress`` of nsa_core
            with its parameters.
    """
    for i, phi in enumerate(phis):
        if kind_of(phi) != config.compress or not _is_plain(phi):
            raise InvalidInput(
                f"phi[{i}], {type(phi).__name__}, must be of the kind"
                f" config.compress={config.compress!r} of nsa_core under torch.compile, without"
                " hooks, parametrizations and replaced layers: call nsa_decode outside of the"
                " compiled function"
            )
    result: torch.Tensor = torch.ops.nsa_core.decode.default(
        q,
        list(keys),
        list(values),
        gates,
        [x for part in pages for x in (part.k, part.v)],
        [*pages.tables, *(pages.scales or ())],
        list(rows[:3]),
        # A call has no gradient, so the output of a compiled one must not require it.
        *([x.detach() for x in phi.parameters()] for phi in phis),
        [] if rope is None else list(rope),
        [max_len, *(n for chunk in rows.chunks for n in chunk)],
        repr((config.values, backends, deterministic)),
    )
    return result


def _is_plain(phi: nn.Module) -> bool:
    """Return whether the parameters of a phi are all that its results depend on."""
    modules = [*phi.modules()]
    return (
        all(type(module) is Affine for module in modules[1:])
        and all(are_plain(type(module), module) for module in modules)
        and all(type(x) in PLAIN_TENSORS for x in phi.parameters())
    )


def _run(
    q: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    gates: torch.Tensor,
    stores: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    phi_k: Sequence[torch.Tensor],
    phi_v: Sequence[torch.Tensor],
    rope: Sequence[torch.Tensor],
    sizes: Sequence[int],
    text: str,
) -> torch.Tensor:
    parts = zip_longest(stores[::2], stores[1::2], tables[:4], tables[4:])  # raw has no scales
    pages = LayerPages(*(PagedKV(*x) for x in parts))
    plan = _plan(text, q.device, q.dtype, pages.sel.rows, pages.kv_dtype)
    config = plan.config
    kind = (config.compress, config.geometry, threading.get_ident())
    phis = _phi("k", config.qk_dim, *kind), _phi("v", config.v_dim, *kind)
    k: Any = tuple(keys)
    v: Any = tuple(values)
    angles: Any = tuple(rope) or None
    chunks = tuple(Chunk(*sizes[i : i + 4]) for i in range(1, len(sizes), 4))
    step = DecodeRows(rows[0], rows[1], rows[2], chunks)
    with _parameters(phis[0], phi_k), _parameters(phis[1], phi_v):
        return decode(plan, q, k, v, gates, pages, step, phis, angles, sizes[0])


def _fake(q: torch.Tensor, keys: Any, values: Sequence[torch.Tensor], *_: Any) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], values[1].shape[-1]))


@functools.lru_cache(maxsize=64)
def _plan(
    text: str, device: torch.device, dtype: torch.dtype, page_size: int, kv_dtype: str | None
) -> Plan:
    values, *options = ast.literal_eval(text)
    return default_plan(NSAConfig(*values), device, dtype, page_size, kv_dtype, *options)


@functools.lru_cache(maxsize=64)
def _phi(of: str, width: int, kind: str, geometry: BlockGeometry, thread: int) -> Phi:
    """Return a phi without memory, one for keys and one for values of each thread."""
    with torch.device("meta"):
        return make_phi(kind, geometry, width).requires_grad_(False)


@contextlib.contextmanager
def _parameters(phi: Phi, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give ``phi`` the parameters ``tensors`` for a while."""
    places: list[tuple[dict[str, Any], str]] = [
        (module._parameters, name) for module in phi.modules() for name in module._parameters
    ]
    own = [parameters[name] for parameters, name in places]
    try:
        for (parameters, name), tensor in zip(places, tensors, strict=True):
            parameters[name] = tensor  # a plain tensor serves
        yield
    finally:
        for (parameters, name), tensor in zip(places, own):
            parameters[name] = tensor


_lib = torch.library.Library("nsa_core", "FRAGMENT")
define(_lib, _SCHEMA, _run, _fake)
