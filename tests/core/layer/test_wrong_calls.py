"""A wrong call of nsa_attention gives one sentence: the cause and the fix."""

import itertools

import pytest
import torch

from cases import SMALL, boundaries, inputs, small
from nsa_core import InvalidInput, nsa_attention
from nsa_core.layer.input_errors import Sizes, shape_errors
from nsa_core.layer.short_config import NUMBERS

CONFIG = small()
SIZES = {name: SMALL[name] for name in NUMBERS if name in SMALL}
q, (_, k, _), (_, v, _), gates = inputs(CONFIG, 2, 12)
CALL = {"q": q, "k": k, "v": v, "gates": gates}


def transposed(*names: str) -> dict[str, torch.Tensor]:
    return {name: CALL[name].transpose(1, 2) for name in names}


def more(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    return torch.randn(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]).double()


# name -> (changed arguments, the whole message before the list of tensors)
WRONG = {
    "all transposed": (
        transposed("q", "k", "v"),
        "q, k and v look like [B, H, S, D]: pass q.transpose(1, 2), k.transpose(1, 2) and"
        " v.transpose(1, 2)",
    ),
    "q transposed": (transposed("q"), "q looks like [B, H, S, D]: pass q.transpose(1, 2)"),
    "k, v transposed": (
        transposed("k", "v"),
        "k and v look like [B, H, S, D]: pass k.transpose(1, 2) and v.transpose(1, 2)",
    ),
    "gates transposed": (
        transposed("gates"),
        "gates look like [B, H, S, 3]: pass gates.transpose(1, 2)",
    ),
    "three k transposed": (
        {"k": [k.transpose(1, 2) for _ in range(3)]},
        "k looks like [B, H, S, D]: pass [x.transpose(1, 2) for x in k]",
    ),
    "gates without factors": (
        {"gates": gates[..., 0]},
        "gates must be [B, S, Hq, 3], got [2, 12, 4]: pass one factor per branch, for example"
        " torch.stack((g_cmp, g_sel, g_win), dim=-1)",
    ),
    "gates without heads": (
        {"gates": gates[:, :, 0]},
        "gates must be [B, S, Hq, 3], got [2, 12, 3]: for the same factors in all heads, pass"
        " gates.unsqueeze(2)",
    ),
    "gates flat": (
        {"gates": gates.flatten(2)},
        "gates must be [B, S, Hq, 3], got [2, 12, 12]: pass gates.unflatten(-1, (4, 3))",
    ),
    "gates [B, S, 3, Hq]": (
        {"gates": gates.mT},
        "gates must be [B, S, Hq, 3], got [2, 12, 3, 4]: pass gates.transpose(-1, -2)",
    ),
    "gates [3, B, S, Hq]": (
        {"gates": gates.movedim(-1, 0)},
        "gates must be [B, S, Hq, 3], got [3, 2, 12, 4]: pass gates.movedim(0, -1)",
    ),
    "gates in a tuple": (
        {"gates": gates.unbind(-1)},
        "gates must be a tensor, got tuple: pass torch.stack(gates, dim=-1)",
    ),
    "gates bfloat16": (
        {"gates": gates.bfloat16()},
        "gates must be float64 beside float64 inputs, got bfloat16: pass gates.to(torch.float64)",
    ),
    "other lengths of k and v": (
        {"k": more(k, 1, 20), "v": more(v, 1, 20)},
        "k and v have 20 tokens, but q and gates have 12 tokens: NSA is self-attention, with one"
        " key and value per query; to continue a sequence, use NSAttention with a cache",
    ),
    "other length of k": (
        {"k": more(k, 1, 20)},
        "k has 20 tokens, but q, v and gates have 12 tokens",
    ),
    "batch of one": (
        {"k": k[:1], "v": v[:1]},
        "k and v have batch size 1, but q and gates have batch size 2: pass"
        " k.expand(2, -1, -1, -1) and v.expand(2, -1, -1, -1)",
    ),
    "no batch": (
        {name: x[0] for name, x in CALL.items()},
        "q, k, v and gates have no batch axis: add it with x.unsqueeze(0), or pass cu_seqlens for"
        " packed documents [T, H, D]",
    ),
    "batch beside cu_seqlens": (
        {"cu_seqlens": boundaries(24)},
        "q, k, v and gates have a batch axis, but cu_seqlens is passed: pass packed documents"
        " [T, H, D] (nsa_core.unpad packs a padded batch), or leave out cu_seqlens",
    ),
    "packed transposed": (
        {**{n: CALL[n][0].transpose(0, 1) for n in "qkv"}, "gates": gates[0]}
        | {"cu_seqlens": boundaries(12)},
        "q, k and v look like [H, T, D]: pass q.transpose(0, 1), k.transpose(0, 1) and"
        " v.transpose(0, 1)",
    ),
    "k without heads": (
        {"k": k[:, :, 0]},
        "k must be [B, S, G, Dk], got [2, 12, 8]: for a single head, pass k.unsqueeze(2)",
    ),
    "q float32": (
        {"q": q.float()},
        "q is float32, but k and v are float64: pass q.to(torch.float64)",
    ),
    "k elsewhere": (
        {"k": k.to("meta")},
        "k is on meta, but q, v and gates are on cpu: pass k.to('cpu')",
    ),
    "numpy": (
        {"q": q.numpy(), "gates": gates.numpy()},
        "q and gates must be tensors, got ndarray: pass torch.from_numpy(q)",
    ),
    "numpy k": (
        {"k": k.numpy()},
        "k must be one tensor or three (cmp, sel, win), got ndarray: pass torch.from_numpy(k)",
    ),
    "list": ({"q": q.tolist()}, "q must be a tensor, got list: pass torch.tensor(q)"),
    "blocks transposed": (
        {"blocks": torch.zeros(2, 2, 12, 4).int()},
        "blocks look like [B, H, S, n]: pass blocks.transpose(1, 2)",
    ),
    "cu_seqlens is a mask": (
        {"cu_seqlens": torch.ones(2, 12).bool()},
        "cu_seqlens must be an int32 tensor [documents + 1], got cu_seqlens [2, 12] bool cpu",
    ),
}


def message_of(changes, **options) -> str:
    with pytest.raises(InvalidInput) as caught:
        nsa_attention(**{**CALL, **changes}, **options)
    return str(caught.value).partition(" (q [")[0]


@pytest.mark.parametrize("options", [{"config": CONFIG}, SIZES], ids=["config", "keywords"])
@pytest.mark.parametrize("name", WRONG)
def test_one_sentence_names_the_cause(name, options):
    changes, message = WRONG[name]
    assert message_of(changes, **options) == message


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (
            {"config": CONFIG},
            {"k": more(k, 2, 4), "v": more(v, 2, 4)},
            "k and v have 4 key/value heads, but config.n_kv_heads is 2: pass a config with"
            " n_kv_heads=4, or keys and values that the query heads of a group share",
        ),
        (
            {"config": small(head_dim=16)},
            {},
            "q and k have heads of width 8, but config.head_dim is 16: pass a config with"
            " head_dim=8",
        ),
        (
            {"config": small(n_heads=8)},
            {},
            "q and gates have 4 query heads, but config.n_heads is 8: pass a config with n_heads=4",
        ),
        (SIZES, {"k": more(k, 2, 4)}, "v has 2 key/value heads, but k has 4 key/value heads"),
        (
            SIZES,
            {"k": more(k, 2, 3), "v": more(v, 2, 3)},
            "q has 4 heads and k has 3: the number of query heads must be a multiple of the number"
            " of key/value heads",
        ),
        (
            {"config": CONFIG},
            {**transposed("q", "v"), "k": q.transpose(1, 2)},
            "q, k and v look like [B, H, S, D]: pass q.transpose(1, 2), k.transpose(1, 2) and"
            " v.transpose(1, 2); k has 4 key/value heads, but config.n_kv_heads is 2",
        ),
    ],
)
def test_sizes_that_differ_from_the_config_or_from_each_other(options, changes, message):
    assert message_of(changes, **options) == message


def shapes_of(b: int, s: int, hq: int, g: int) -> dict[str, tuple[int, ...]]:
    return {
        "q": (b, s, hq, 8),
        "k": (b, s, g, 8),
        "v": (b, s, g, 6),
        "gates": (b, s, hq, 3),
        "blocks": (b, s, g, 4),
    }


@pytest.mark.parametrize("with_config", [False, True])
def test_correct_shapes_are_never_taken_for_transposed(with_config):
    """In particular if S equals a number of heads, the batch size or a width."""
    for b, s, (hq, g) in itertools.product((1, 3), (1, 2, 3, 4, 6, 8), ((1, 1), (3, 3), (8, 2))):
        config = small(n_heads=hq, n_kv_heads=g) if with_config else None
        assert shape_errors(shapes_of(b, s, hq, g), Sizes(config, "", CONFIG.geometry, False)) == []


@pytest.mark.parametrize("names", [("q",), ("k", "v"), ("q", "k", "v"), ("q", "k", "v", "gates")])
def test_transposed_tensors_are_named_with_and_without_a_config(names):
    for hq, g in ((8, 2), (8, 1), (6, 3)):
        shapes = shapes_of(2, 37, hq, g)
        swapped = {n: (x[0], x[2], x[1], x[3]) if n in names else x for n, x in shapes.items()}
        for config in (None, small(n_heads=hq, n_kv_heads=g)):
            (sentence,) = shape_errors(swapped, Sizes(config, "config", CONFIG.geometry, False))
            assert [n for n in shapes if f"{n}.transpose(1, 2)" in sentence] == list(names)
