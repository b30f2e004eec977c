"""HeadShards: the parameters of a tensor parallel model, whole for checkpoints.

:class:`nsa_core.parallel.HeadParallel` replaces the parameters of attention layers by those of the
rank's heads. Checkpoints hold the parameters of one process, so that a run goes on with any number
of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from nsa_core.layer.module import NSAttention
from nsa_core.parallel import HeadParallel, whole_parameters
from nsa_models.lm.model import LanguageModel


class HeadShards:
    """Divide the heads of a model over the ranks of a mesh, and put its tensors together again.

    Args:
        model: The model, on its device; its attention layers are divided in place.
        mesh: The tensor parallel ranks, a mesh of one dimension.

    Attributes:
        names: The parameters of the model that differ between the ranks.

    Raises:
        InvalidInput: The number of ranks does not divide n_kv_heads, or the attention is dense.
    """

    def __init__(self, model: LanguageModel, mesh: DeviceMesh) -> None:
        self._model, self._mesh = model, mesh
        shapes = {name: p.shape for name, p in model.named_parameters()}
        parallelize_module(model, mesh, {"blocks.*.attn": HeadParallel()})
        self.names = frozenset(n for n, p in model.named_parameters() if p.shape != shapes[n])

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that one process would have, layer by layer.

        Every rank must call this, and take all of them.

        Args:
            tensors: A tensor for each of ``names``: parameters, or their moments in an optimizer.
        """
        for prefix, layer in self._layers():
            scratch = self._divided(self._scratch(layer))
            own, names = dict(scratch.named_parameters()), self._names_in(prefix)
            with torch.no_grad():
                for name in names:
                    own[name].copy_(unshard(tensors[prefix + name]))
            whole = whole_parameters(scratch)
            yield from ((prefix + name, whole[name]) for name in names)

    @torch.no_grad()
    def fill(
        self, targets: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]
    ) -> None:
        """Fill this rank's parts of the tensors of one process: the inverse of :meth:`whole`.

        Args:
            targets: A tensor for each of ``names``.
            read: Returns the tensor of one process with this name.
        """
        for prefix, layer in self._layers():
            scratch, names = self._scratch(layer), self._names_in(prefix)
            whole = dict(scratch.named_parameters())
            for name in names:
                whole[name].copy_(read(prefix + name))
            own = dict(self._divided(scratch).named_parameters())
            for name in names:
                target, part = targets[prefix + name], own[name].detach()
                if isinstance(target, DTensor):
                    # Every rank takes its rows of the part, without communication.
                    part = distribute_tensor(
                        part, target.device_mesh, target.placements, src_data_rank=None
                    )
                target.copy_(part)

    def _divided(self, layer: NSAttention) -> NSAttention:
        divided = parallelize_module(layer, self._mesh, HeadParallel())
        assert isinstance(divided, NSAttention)
        return divided

    def _layers(self) -> list[tuple[str, NSAttention]]:
        modules = self._model.named_modules()
        return [(f"{name}.", m) for name, m in modules if isinstance(m, NSAttention)]

    def _names_in(self, prefix: str) -> list[str]:
        return sorted(n.removeprefix(prefix) for n in self.names if n.startswith(prefix))

    def _scratch(self, layer: NSAttention) -> NSAttention:
        """Return an undivided layer without values, built without random numbers."""
        with torch.device("meta"):
            scratch = NSAttention(self._model.config.layer)
        weight = layer.qkv.weight
        return scratch.to_empty(device=weight.device).to(weight.dtype)


def unshard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole that FSDP sharded; every process of its mesh must call this."""
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()
