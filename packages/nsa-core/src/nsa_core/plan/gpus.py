"""GPUs by name, so that commands answer for a GPU that this machine does not have. No torch."""

from __future__ import annotations

import dataclasses
import re

from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean, one_line


@dataclasses.dataclass(frozen=True)
class GPU:
    """A GPU that a request describes.

    Attributes:
        name: Product name, such as "A100", or the architecture, such as "sm_80".
        capability: Compute capability, the only property of a GPU that a Request states.
    """

    name: str
    capability: tuple[int, int]

    @property
    def architecture(self) -> str:
        """The architecture, such as "sm_80"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def title(self) -> str:
        """Name and architecture, for messages: "A100 (sm_80)"."""
        return self.name if self.name == self.architecture else f"{self.name} ({self.architecture})"


GPUS = (
    GPU("V100", (7, 0)),
    GPU("T4", (7, 5)),
    GPU("A100", (8, 0)),
    GPU("A10", (8, 6)),
    GPU("RTX-3090", (8, 6)),
    GPU("L4", (8, 9)),
    GPU("L40S", (8, 9)),
    GPU("RTX-4090", (8, 9)),
    GPU("H100", (9, 0)),
    GPU("H200", (9, 0)),
    GPU("GH200", (9, 0)),
    GPU("B200", (10, 0)),
    GPU("B300", (10, 3)),
    GPU("RTX-5090", (12, 0)),
)
# Architectures without a product above: Jetson Orin, Thor and DGX Spark.
_OTHER_CAPABILITIES = ((8, 7), (11, 0), (12, 1))
ARCHITECTURES = tuple(
    GPU(f"sm_{major}{minor}", (major, minor))
    for major, minor in sorted({gpu.capability for gpu in GPUS} | {*_OTHER_CAPABILITIES})
)


def _key(name: str) -> str:
    """Return ``name`` in lower case without separators, as names are compared."""
    return re.sub(r"[\s_-]+", "", name).lower()


def gpu_named(name: str) -> GPU:
    """Return the GPU called ``name``; case, spaces, "-" and "_" do not matter.

    Args:
        name: A product ("a100", "rtx 4090") or an architecture ("sm_80").

    Raises:
        InvalidInput: No known GPU has this name. The message suggests a similar name and lists
            all.
    """
    known = {_key(gpu.name): gpu for gpu in (*GPUS, *ARCHITECTURES)}
    if _key(name) in known:
        return known[_key(name)]
    names = [gpu.name.lower() for gpu in known.values()]
    raise InvalidInput(
        f"unknown GPU {one_line(name)!r}{did_you_mean(name, names)} (known: {', '.join(names)})"
    )
