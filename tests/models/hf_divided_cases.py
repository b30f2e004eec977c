"""Models of transformers whose layers are divided over ranks, against the model of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from hf_models import nsa_model
from nsa_core import NSAError
from nsa_core.parallel import ContextParallel, HeadParallel, Shards, whole_parameters
from nsa_models.lm.head_shards import unshard

LAYERS = "model.layers.*.self_attn"
LENGTH, DOCUMENTS = 96, [0, 5, 51, 96]


def _plan(model: Any, style: Any, dense: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of parallelize_module: a style for NSA layers, styles in dense layers."""
    plan: dict[str, Any] = {}
    for number in range(len(model.model.layers)):
        layer = f"model.layers.{number}.self_attn"
        is_nsa = number in model.model.nsa_layers
        plan |= {layer: style} if is_nsa else {f"{layer}.{n}": s for n, s in dense.items()}
    return plan


def _model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return nsa_model(kind, torch.float64, **changes).train()


def _row() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [1, S], and the label of each row; the last row of a document has none."""
    ids = torch.randint(1, 61, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, [end - 1 for end in DOCUMENTS[1:]]] = -100
    return ids, labels


def _packing(packed: bool) -> dict[str, Any]:
    if not packed:
        return {}
    return {"cu_seq_lens_q": torch.tensor(DOCUMENTS, dtype=torch.int32), "max_length_q": 46}


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=1e-12))


def tokens(
    rank: int, world: int, *, kind: str, packed: bool, recompute: bool = False, mode: str = "auto"
) -> Any:
    """Return the errors of the logits, the loss and the gradients under ContextParallel."""
    ids, labels = _row()
    options = {**_packing(packed), "num_items_in_batch": (labels != -100).sum()}
    alone, model = _model(kind), _model(kind)
    if recompute:
        enable = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
        (enable or model.gradient_checkpointing_enable)()
    expected = alone(ids, shift_labels=labels, **options)
    expected.loss.backward()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    parallelize_module(model, mesh["cp"], {LAYERS: ContextParallel(mode)})
    shards = Shards(LENGTH, world, rank)
    actual = model(shards.take(ids, 1), shift_labels=shards.take(labels, 1), **options)
    actual.loss.backward()
    loss = actual.loss.detach().clone()
    dist.all_reduce(loss)
    errors = {
        "logits": _largest(actual.logits, shards.take(expected.logits, 1)),
        "loss": _largest(loss, expected.loss),
    }
    for (name, parameter), of_one in zip(model.named_parameters(), alone.parameters()):
        dist.all_reduce(parameter.grad)
        errors[name] = _largest(parameter.grad, of_one.grad)
    return errors


DENSE_HEADS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()),
    "o_proj": RowwiseParallel(),
}


def heads(
    rank: int, world: int, *, kind: str, padded: bool, dense: bool = False, **changes: Any
) -> Any:
    """Return the errors of the logits, the loss and the gradients under HeadParallel.

    ``dense`` divides the heads of dense layers too, by styles of torch.
    """
    ids, labels = _row()
    mask = torch.ones_like(ids)
    if padded:
        mask[:, :20], labels[:, :20] = 0, -100
    alone, model = _model(kind, **changes), _model(kind, **changes)
    expected = alone(ids, attention_mask=mask, shift_labels=labels)
    expected.loss.backward()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    plan = _plan(model, HeadParallel(), DENSE_HEADS if dense else {})
    parallelize_module(model, mesh["tp"], plan)
    actual = model(ids, attention_mask=mask, shift_labels=labels)
    actual.loss.backward()
    errors = {
        "logits": _largest(actual.logits, expected.logits),
        "loss": _largest(actual.loss, expected.loss),
    }
    for number in model.model.nsa_layers:
        one, divided = alone.model.layers[number], model.model.layers[number]
        with torch.no_grad():
            for parameter in divided.self_attn.parameters():
                parameter.copy_(parameter.grad)
        whole = whole_parameters(divided.self_attn)
        for name, parameter in one.self_attn.named_parameters():
            errors[name] = _largest(whole[name], parameter.grad)
    nsa = tuple(f"model.layers.{number}.self_attn" for number in model.model.nsa_layers)
    grads = {n: unshard(p.grad) for n, p in model.named_parameters() if not n.startswith(nsa)}
    errors |= {n: _largest(grad, alone.get_parameter(n).grad) for n, grad in grads.items()}
    return errors


def saved(
    rank: int, world: int, *, kind: str, folder: str, sharded: bool = False, **changes: Any
) -> Any:
    """Save a divided model, load it on each rank alone, and compare it with the undivided one."""
    ids, _ = _row()
    alone, model = _model(kind, **changes), _model(kind, **changes)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], _plan(model, HeadParallel(), {}))
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    if sharded:
        fully_shard(model, mesh=mesh["dp"])
    model.save_pretrained(folder)
    dist.barrier()
    after = {
        name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()
    }
    unchanged = all(torch.equal(after[name], own[name]) for name in own)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    state = loaded.state_dict()
    return {
        "class": type(loaded).__name__,
        "logits": torch.equal(loaded(ids).logits, alone.eval()(ids).logits),
        "parameters": all(torch.equal(state[n], x) for n, x in alone.state_dict().items()),
        "unchanged": unchanged,
    }


def refusal(rank: int, world: int, *, of: str) -> str:
    """Return the error of a call that a divided model refuses."""
    mesh = init_device_mesh("cpu", (world,))
    ids = torch.ones(1, LENGTH // world, dtype=torch.long)

    def divided(style: Any, kind: str = "llama", **changes: Any) -> Any:
        model = _model(kind, **changes)
        return parallelize_module(model, mesh, _plan(model, style, {}))

    actions = {
        "a mask": lambda: divided(ContextParallel())(ids, attention_mask=torch.ones_like(ids)),
        "a mask for the decoder": lambda: divided(ContextParallel()).model(
            ids, attention_mask=torch.ones_like(ids)
        ),
        "boundaries of two rows": lambda: divided(ContextParallel())(
            ids.expand(2, -1), **_packing(True)
        ),
        "positions": lambda: divided(ContextParallel())(ids, position_ids=torch.arange(48)[None]),
        "labels": lambda: divided(ContextParallel())(ids, labels=ids),
        "dense layers": lambda: divided(ContextParallel(), nsa_layers=[1])(ids),
        "a dense layer": lambda: parallelize_module(
            _model("qwen3", nsa_layers=[0]), mesh, {LAYERS: ContextParallel()}
        ),
        "a cache": lambda: divided(ContextParallel())(ids, use_cache=True),
        "generation": lambda: divided(ContextParallel()).generate(ids, max_new_tokens=2),
        "generation without a cache": lambda: divided(ContextParallel()).generate(
            ids, max_new_tokens=2, use_cache=False
        ),
        "generation of divided heads": lambda: divided(HeadParallel()).generate(ids),
        "a state_dict to save": lambda: divided(HeadParallel()).save_pretrained("no", True, {}),
    }
    try:
        actions[of]()
    except NSAError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
