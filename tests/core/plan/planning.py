"""Registries of fake backends, for tests of how a plan is resolved."""

from __future__ import annotations

from nsa_core.config import NSAConfig
from nsa_core.contract import API_VERSION, SLOTS, BackendSpec, SlotSpec
from nsa_core.plan.registry import Registry

CONFIG = NSAConfig(dim=32, n_heads=4, n_kv_heads=2)


def spec(name: str, probe: str = "accept", slots=SLOTS, **fields) -> BackendSpec:
    """Return a spec whose functions live in the module of the fixture ``toy``."""
    slot = SlotSpec("planned:forward", "planned:forward", workspace=fields.pop("workspace", None))
    return BackendSpec(name, API_VERSION, dict.fromkeys(slots, slot), f"planned:{probe}", **fields)


def registry_of(*specs: BackendSpec) -> Registry:
    registry = Registry()
    for backend_spec in specs:
        registry = registry.with_backend(backend_spec, version="1.0")
    return registry


def backends(plan) -> dict[str, str]:
    return {slot: choice.backend for slot, choice in plan.choices.items()}
