"""The page of an inspection: one HTML file without external resources."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import torch

from nsa_core.util.extras import require_module
from nsa_core.util.text import escape_control
from nsa_models.inspect.collect import Inspection, LayerInspection
from nsa_models.inspect.findings import UNTRAINED, headline, sentences, shares


def page(inspection: Inspection, layer: int) -> str:
    """Render the page.

    Args:
        inspection: The inspection.
        layer: Index of the layer that the page shows first.

    Returns:
        The HTML. Text of the inspection is escaped, and the page's content security policy allows
        no script but its own and no request.

    Raises:
        BackendUnavailable: jinja2 is not installed.
    """
    jinja2 = require_module("jinja2", "the page of an inspection needs", "nsa-cli[plot]")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nsa_models.inspect"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    script, _, _ = environment.loader.get_source(environment, "page.js")
    style, _, _ = environment.loader.get_source(environment, "page.css")
    head, token = _telling_query(inspection.layers[layer])
    titles = [headline(inspection, index) for index in range(len(inspection.layers))]
    html: str = environment.get_template("page.html").render(
        inspection=inspection,
        spans=[span._replace(text=escape_control(span.text)) for span in inspection.spans],
        titles=titles,
        layer=layer,
        untrained=UNTRAINED,
        findings=sentences(inspection),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=style,
        data={
            "length": len(inspection.tokens),
            "layer": layer,
            "head": head,
            "token": token,
            "layers": [_layer_data(layer) for layer in inspection.layers],
            "titles": titles,
        },
    )
    return html


def _telling_query(layer: LayerInspection) -> tuple[int, int]:
    """Return the kv head and the query whose chosen blocks hold most of dense attention."""
    head = max(range(layer.config.n_kv_heads), key=lambda head: shares(layer, head).gain)
    chosen = layer.mass.selected[:, head] - layer.mass.forced[:, head]
    return head, int(chosen[layer.first_choice :].argmax()) + layer.first_choice


def _layer_data(layer: LayerInspection) -> dict[str, Any]:
    """Return the layer for the page's script; arrays are base64 of bytes."""
    config, mass = layer.config, layer.mass
    return {
        "size": config.select_block_size,
        "heads": config.n_kv_heads,
        "count": mass.blocks.shape[-1],
        "cells": _bytes(layer.cells()),  # [G, C, S]
        "gates": _bytes(_half_percents(layer.group_gates())),  # [S, G, 3]
        "shares": _bytes(  # [S, G, 3]
            _half_percents(torch.stack((mass.selected, mass.random, mass.best), -1))
        ),
        "mass": _bytes(_half_percents(mass.blocks)),  # [S, G, C]
    }


def _half_percents(x: torch.Tensor) -> torch.Tensor:
    """Return values of 0 to 1 in steps of half a percent, as integers of 0 to 200."""
    return (x * 200).round().clamp(0, 200)


def _bytes(x: torch.Tensor) -> str:
    return base64.b64encode(bytes(x.to(torch.uint8).flatten().tolist())).decode()
