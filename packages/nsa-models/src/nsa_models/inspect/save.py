"""Write the pictures of an inspection into a folder."""

from __future__ import annotations

from pathlib import Path

from nsa_core.util.atomic_files import check_output_folder, write_bytes_atomic, writing
from nsa_core.util.extras import require_module
from nsa_models.inspect.collect import Inspection
from nsa_models.inspect.findings import clearest_layer
from nsa_models.lm.config import check_layer

PAGE = "inspect.html"
FILES = (PAGE, "selection.png", "layers.png", "selection.svg", "layers.svg")


def save(
    inspection: Inspection, out: str | Path, layer: int | None = None, force: bool = False
) -> list[Path]:
    """Write the pictures of an inspection.

    Args:
        inspection: The inspection.
        out: The folder; it is created if it does not exist.
        layer: Number of the layer in the detailed picture, which the page shows first. The default
            is the layer whose choice gains most over a random one.
        force: Overwrite pictures in a folder that is not empty.

    Returns:
        The files: inspect.html (all layers, interactive), selection.png and selection.svg (one
        layer), layers.png and layers.svg (all layers).

    Raises:
        InvalidInput: The folder or the layer cannot be used.
        BackendUnavailable: matplotlib or jinja2 is not installed.
        NotWritten: The operating system refuses the write.
    """
    require_module("matplotlib", "plots need", "nsa-cli[plot]")
    from nsa_models.inspect.draw import detail, overview
    from nsa_models.inspect.page import page

    folder = Path(out)
    numbers = [one.number for one in inspection.layers]
    check_layer(layer, numbers)
    check_output_folder(folder, force, "force=True to overwrite its pictures")
    index = clearest_layer(inspection) if layer is None else numbers.index(layer)
    contents: dict[str, bytes] = {PAGE: page(inspection, index).encode("utf-8")}
    for kind in ("png", "svg"):
        contents[f"selection.{kind}"] = detail(inspection, index, kind)
        contents[f"layers.{kind}"] = overview(inspection, kind)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        write_bytes_atomic(folder / name, content, force)
    return [folder / name for name in contents]
