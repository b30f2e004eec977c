"""A wrong call is refused before any kernel runs; the error names the argument and the fix."""

import itertools
import re

import numpy as np
import pytest
import torch

from cases import SMALL, boundaries, inputs, layer_of, sdpa_plan, small
from nsa_core import InvalidInput, NSAttention, nsa_attention, pad, resolve, unpad
from nsa_core.layer import attention
from nsa_core.layer.short_config import NUMBERS
from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.gpus import gpu_named
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import decide
from nsa_core.plan.registry import default_registry
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_core.torch_ops.tensor_checks import Metadata, Sizes, call_problems

CONFIG = small()
SIZES = {name: SMALL[name] for name in NUMBERS if name in SMALL}
THREE = inputs(CONFIG, 2, 12)  # one tensor per branch
q, (_, k, _), (_, v, _), gates = THREE
CALL = {"q": q, "k": k, "v": v, "gates": gates}
PACKED = {name: x[0] for name, x in CALL.items()} | {"cu_seqlens": boundaries(12)}
X = torch.randn(2, 9, 24).double()
ROWS = torch.randn(9, 24).double()
MASK = torch.tensor([[1, 1, 1, 0]])
ON_GPU = find_candidates(
    CONFIG,
    PlanOptions(device="cuda", dtype="float64"),
    registry=default_registry(),
    gpu=gpu_named("h100"),
)


def attend(**changes):
    nsa_attention(**{**CALL, "config": CONFIG, **changes})


def attend_three(**changes):
    nsa_attention(**{**THREE._asdict(), "config": CONFIG, **changes})


def attend_short(**changes):
    nsa_attention(**{**CALL, **SIZES, **changes})


def layer(**changes):
    layer_of()(**{"x": X, **changes})


def cached(**changes):
    attn = layer_of()
    cache = attn.new_cache(2, 16)
    try:
        attn(**{"x": X, "cache": cache, **changes})
    finally:
        assert cache.host_lengths() == [0, 0]


def new_cache(**changes):
    layer_of().new_cache(2, 16, **changes)


def build(**changes):
    NSAttention(**{"config": CONFIG, **changes})


def replace_config(config):
    layer_of().config = config


def plan(**changes):
    resolve(**{"config": CONFIG, **changes})


def strip(**changes):
    unpad(**{"x": torch.randn(1, 4, 2), "attention_mask": MASK, **changes})


def transposed(*names):
    return {name: CALL[name].transpose(1, 2) for name in names}


def more(tensor, axis, size):
    return torch.randn(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]).double()


def changed(dtype, *names):
    return {name: CALL[name].to(dtype) for name in names}


def nested(*shape, **options):
    return torch.nested.nested_tensor([torch.randn(5, *shape), torch.randn(9, *shape)], **options)


def with_gaps():
    starts, lengths = torch.tensor([0, 0]), torch.tensor([3, 4])
    return torch.nested.narrow(torch.randn(2, 9, 24), 1, starts, lengths, layout=torch.jagged)


def quantised(x):
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


# Changes of a right call of nsa_attention, and the whole message before the list of tensors.
SENTENCES = [
    (
        transposed("q", "k", "v"),
        "q, k and v look like [B, H, S, D]: pass q.transpose(1, 2), k.transpose(1, 2) and"
        " v.transpose(1, 2)",
    ),
    (transposed("q"), "q looks like [B, H, S, D]: pass q.transpose(1, 2)"),
    (
        transposed("k", "v"),
        "k and v look like [B, H, S, D]: pass k.transpose(1, 2) and v.transpose(1, 2)",
    ),
    (transposed("gates"), "gates look like [B, H, S, 3]: pass gates.transpose(1, 2)"),
    (
        {"k": [k.transpose(1, 2) for _ in range(3)]},
        "k looks like [B, H, S, D]: pass [x.transpose(1, 2) for x in k]",
    ),
    (
        {"blocks": torch.zeros(2, 2, 12, 4).int()},
        "blocks look like [B, H, S, n]: pass blocks.transpose(1, 2)",
    ),
    (
        {**PACKED, **{n: CALL[n][0].transpose(0, 1) for n in "qkv"}},
        "q, k and v look like [H, T, D]: pass q.transpose(0, 1), k.transpose(0, 1) and"
        " v.transpose(0, 1)",
    ),
    (
        {"gates": gates[..., 0]},
        "gates must be [B, S, Hq, 3], got [2, 12, 4]: pass one factor per branch, for example"
        " torch.stack((g_cmp, g_sel, g_win), dim=-1)",
    ),
    (
        {"gates": gates[:, :, 0]},
        "gates must be [B, S, Hq, 3], got [2, 12, 3]: for the same factors in all heads, pass"
        " gates.unsqueeze(2)",
    ),
    (
        {"gates": gates.flatten(2)},
        "gates must be [B, S, Hq, 3], got [2, 12, 12]: pass gates.unflatten(-1, (4, 3))",
    ),
    (
        {"gates": gates.mT},
        "gates must be [B, S, Hq, 3], got [2, 12, 3, 4]: pass gates.transpose(-1, -2)",
    ),
    (
        {"gates": gates.movedim(-1, 0)},
        "gates must be [B, S, Hq, 3], got [3, 2, 12, 4]: pass gates.movedim(0, -1)",
    ),
    (
        {"gates": gates.unbind(-1)},
        "gates must be a tensor, got tuple: pass torch.stack(gates, dim=-1)",
    ),
    (
        changed(torch.bfloat16, "gates"),
        "gates must be float64 beside float64 inputs, got bfloat16: pass gates.to(torch.float64)",
    ),
    (
        {"k": more(k, 1, 20), "v": more(v, 1, 20)},
        "k and v have 20 tokens, but q and gates have 12 tokens: NSA is self-attention, with one"
        " key and value per query; to continue a sequence, use NSAttention with a cache",
    ),
    ({"k": more(k, 1, 20)}, "k has 20 tokens, but q, v and gates have 12 tokens"),
    (
        {"k": k[:1], "v": v[:1]},
        "k and v have batch size 1, but q and gates have batch size 2: pass"
        " k.expand(2, -1, -1, -1) and v.expand(2, -1, -1, -1)",
    ),
    (
        {name: x[0] for name, x in CALL.items()},
        "q, k, v and gates have no batch axis: add it with x.unsqueeze(0), or pass cu_seqlens for"
        " packed documents [T, H, D]",
    ),
    (
        {"cu_seqlens": boundaries(24)},
        "q, k, v and gates have a batch axis, but cu_seqlens is passed: pass packed documents"
        " [T, H, D] (nsa_core.unpad packs a padded batch), or leave out cu_seqlens",
    ),
    (
        {"q": q[0]},
        "q must be [B, S, Hq, Dk], got [12, 4, 8]: add the batch axis with .unsqueeze(0)",
    ),
    (
        {"k": k[:, :, 0]},
        "k must be [B, S, G, Dk], got [2, 12, 8]: for a single head, pass k.unsqueeze(2)",
    ),
    (
        changed(torch.float32, "q"),
        "q is float32, but k and v are float64: pass q.to(torch.float64)",
    ),
    ({"k": k.to("meta")}, "k is on meta, but q, v and gates are on cpu: pass k.to('cpu')"),
    (
        {"q": q.numpy(), "gates": gates.numpy()},
        "q and gates must be tensors, got ndarray: pass torch.from_numpy(q)",
    ),
    (
        {"k": k.numpy()},
        "k must be one tensor or three (cmp, sel, win), got ndarray: pass torch.from_numpy(k)",
    ),
    ({"q": q.tolist()}, "q must be a tensor, got list: pass torch.tensor(q)"),
    ({"gates": None}, "gates must be a tensor, got NoneType"),
    (
        {"cu_seqlens": torch.ones(2, 12).bool()},
        "cu_seqlens must be an int32 tensor [documents + 1], got cu_seqlens [2, 12] bool cpu",
    ),
]

UNFIT = [
    lambda x: x[:, :-1],
    lambda x: x.float(),
    lambda x: x.to("meta"),
    lambda x: x[0, 0],
]
# call -> changes of its arguments, and words of the message
INVALID = {
    attend: [
        *(({name: unfit(x)}, f"{name} [") for name, x in CALL.items() for unfit in UNFIT),
        ({"q": q[..., :3, :]}, "q has 3 query heads, but config.n_heads is 4 ("),
        (
            {"k": more(k, 2, 4), "v": more(v, 2, 4)},
            "k and v have 4 key/value heads, but config.n_kv_heads is 2: pass a config with"
            " n_kv_heads=4, or keys and values that the query heads of a group share",
        ),
        (
            {"config": small(head_dim=16)},
            "q and k have heads of width 8, but config.head_dim is 16: pass a config with"
            " head_dim=8",
        ),
        (
            {"config": small(n_heads=8)},
            "q and gates have 4 query heads, but config.n_heads is 8: pass a config with n_heads=4",
        ),
        (
            {"q": q[..., :0, :], "gates": gates[..., :0, :]},
            "q and gates have 0 query heads, but config.n_heads is 4 (",  # no config has 0
        ),
        (
            {**transposed("q", "v"), "k": q.transpose(1, 2)},
            "q, k and v look like [B, H, S, D]: pass q.transpose(1, 2), k.transpose(1, 2) and"
            " v.transpose(1, 2); k has 4 key/value heads, but config.n_kv_heads is 2",
        ),
        ({"gates": gates[..., :2]}, "a factor for each of cmp, sel and win, got 2 factors ("),
        ({"blocks": torch.zeros(2, 12, 1, 4).int()}, "blocks have 1 key/value head, but config"),
        ({"blocks": torch.zeros(2, 12, 2, 4)}, "blocks must be integers, got float32"),
        ({"blocks": torch.zeros(2, 12, 2, 4).bool()}, "blocks must be integers, got bool"),
        ({"k_cmp": torch.randn(2, 2, 2, 8).double()}, "pass both or neither"),
        ({"k": (k, k)}, "k must be one tensor or three", "tuple of length 2"),
        ({"v": (v, None, None)}, "v lacks its sel, win entry"),
        ({"q": q[..., :6], "gates": gates[:, :4]}, "q has heads of width 6", "gates have 4 tokens"),
        (changed(torch.int8, "q", "k", "v"), "q, k and v are int8: pass bfloat16, "),
        (changed(torch.complex64, "q", "k", "v"), "q, k and v are complex64: pass bfloat16, "),
        ({"max_seqlen": 12}, "max_seqlen goes with cu_seqlens"),
        ({"config": {"dim": 64}}, "config must be an NSAConfig, got dict", "NSAConfig(**config)"),
        ({"window_size": 9, "scale": 0.5}, "config and window_size=9, scale=0.5 are passed, but"),
        (
            {"plan": sdpa_plan(small(window_size=3))},
            "plan is for window_size=3, but the call has window_size=9: resolve",
        ),
        (
            {"plan": sdpa_plan(CONFIG, torch.float32)},
            "plan is for float32 on cpu, but the tensors are float64 on cpu",
        ),
        ({"plan": decide(ON_GPU)}, "plan is for float64 on cuda"),
        ({**PACKED, "plan": sdpa_plan(CONFIG)}, "without varlen=True"),
        (
            {"q": q.clone().requires_grad_(), "plan": sdpa_plan(CONFIG, needs_grad=False)},
            "without needs_grad=True",
        ),
        ({"q": q.to_sparse()}, "q is sparse (torch.sparse_coo): pass q.to_dense()"),
        (
            {"gates": nested(4, 3, layout=torch.jagged)},
            "gates is a nested tensor: pass gates.values() as gates",
        ),
        ({"q": quantised(q)}, "q is quantised: pass q.dequantize()"),
        ({"nonnegative_gates": True}, "nonnegative_gates is True, but the smallest of gates is -"),
    ],
    attend_three: [
        (
            {"k": (THREE.k[0], THREE.k[1][:, :-1], THREE.k[2])},
            "k[sel] has 11 tokens, but q, k[cmp], k[win], v[cmp]",
            "v[win] [2, 12, 2, 6]",
        ),
        (
            {"v": (*THREE.v[:2], THREE.v[2][..., :5])},
            "v[win] has heads of width 5, but config.v_head_dim is 6 (",
        ),
        (
            {"k": (THREE.k[0].float(), *THREE.k[1:])},
            "k[cmp] is float32, but q, ",
            "pass k[cmp].to(torch.float64) (",
        ),
        (
            {"k_cmp": torch.randn(2, 3, 2, 8).double(), "v_cmp": torch.randn(2, 2, 2, 6).double()},
            "k_cmp has 3 compressed tokens, but 12 tokens have 2 for blocks of 8 tokens every 4",
        ),
    ],
    attend_short: [
        (
            {"plan": sdpa_plan(CONFIG), "window_size": 5},
            "plan is for window_size=9, but the call has window_size=5: resolve",
        ),
        (
            {**dict.fromkeys(SIZES), "plan": sdpa_plan(small(n_heads=8))},
            "4 query heads, but plan.config.n_heads is 8",
        ),
        (
            {"k_cmp": torch.randn(2, 3, 2, 8).double(), "v_cmp": torch.randn(2, 3, 2, 6).double()},
            "k_cmp and v_cmp have 3 compressed tokens, but 12 tokens have 2 for blocks of 8 tokens"
            " every 4",
        ),
        (
            {**PACKED, "k_cmp": torch.randn(2, 2, 8).double()}
            | {"v_cmp": torch.randn(2, 2, 6).double()},
            "k_cmp and v_cmp have 2 compressed tokens, but 12 tokens have T // d = 3",
        ),
        (
            {"k_cmp": torch.randn(2, 2, 2, 8).double(), "v_cmp": torch.randn(2, 3, 2, 6).double()},
            "v_cmp has 3 compressed tokens, but k_cmp has 2 compressed tokens",
        ),
        ({"k": more(k, 2, 4)}, "v has 2 key/value heads, but k has 4 key/value heads"),
        (
            {"k": more(k, 2, 3), "v": more(v, 2, 3)},
            "q has 4 heads and k has 3: the number of query heads must be a multiple of the number"
            " of key/value heads",
        ),
        ({"window_size": "9"}, "window_size must be an integer >= 1, got '9'"),
        ({"window_size": [9]}, "window_size must be an integer >= 1, got [9]"),
        ({"window_size": True}, "window_size must be an integer >= 1, got True"),
        ({"compress_stride": 3}, "compress_stride must divide compress_block_size, got 3 and 8"),
        ({"scale": float("nan")}, "scale must be finite"),
    ],
    layer: [
        ({"x": ROWS[..., :23]}, "[T, dim] with cu_seqlens", "dim = 24", "[9, 23]"),
        ({"cu_seqlens": boundaries(9)}, "[T, dim] beside cu_seqlens"),
        ({"x": torch.randn(2, 24, 9).double()}, "[B, dim, S], pass x.transpose(1, 2)"),
        ({"x": X.float()}, "x is torch.float32, the layer's parameters are torch.float64: convert"),
        ({"x": X.long()}, "x is torch.int64"),
        ({"x": X.to("meta")}, "x is on meta, the layer on cpu"),
        ({"x": X.to_sparse()}, "x is sparse (torch.sparse_coo): pass x.to_dense()"),
        ({"x": ROWS.to_sparse_csr()}, "x is sparse (torch.sparse_csr): pass x.to_dense()"),
        ({"x": quantised(X)}, "x is quantised: pass x.dequantize()"),
        (
            {"x": nested(24, layout=torch.jagged)},
            "x is a nested tensor: pass x.values() as x, and cu_seqlens=x.offsets().int()",
        ),
        ({"x": with_gaps()}, "x is a nested tensor: pass x.contiguous().values() as x"),
        ({"x": nested(24), "cu_seqlens": boundaries(5, 9)}, "pass torch.cat(x.unbind()) as x"),
        ({"attention_mask": torch.ones(2, 9), "context": 1}, "attention_mask", "context: NSA is"),
        ({"key_value_states": X}, "key_value_states: NSA is self-attention only"),
    ],
    new_cache: [
        ({"dtype": "float32"}, "dtype must be a torch.dtype such ", "got 'float32'"),
        ({"plan": 3}, "plan must be what nsa_core.resolve() returns, got int"),
    ],
    small: [
        *(
            ({field: value}, f"{field} must be True or False, got ")
            for field in ("rope", "rope_before_compress", "qk_norm", "shared_kv", "causal")
            for value in ("false", 1, None, torch.tensor(True))
        ),
        *(
            ({field: value}, f"{message}, got ")
            for field, message in (
                ("scale", "scale must be finite (a number) or None"),
                ("rope_base", "rope_base must be a finite number > 0"),
                ("dropout", "dropout is not part of NSA"),
            )
            for value in ("1", True, torch.tensor(1.0), 10**400, [1.0], 1j)
        ),
        ({"dropout": 0.1}, "dropout is not part of NSA, got dropout=0.1; apply dropout outside"),
        ({"causal": False}, "causal must be True, got False: NSA is causal attention"),
    ],
    plan: [
        ({"batch": -1}, "batch must be an integer >= 0 or None, got -1"),
        ({"batch": 2.5}, "batch must be an integer >= 0 or None, got 2.5"),
        ({"seq_len": "20"}, "seq_len must be an integer >= 0 or None, got '20'"),
        ({"seq_len": True}, "seq_len must be an integer >= 0 or None, got True"),
        ({"page_size": "64"}, "page_size must be an integer >= 1 or None, got '64'"),
        ({"page_size": 0}, "page_size must be an integer >= 1 or None, got 0"),
        ({"needs_grad": "no"}, "needs_grad must be True or False, got 'no'"),
        ({"deterministic": 1}, "deterministic must be True or False, got 1"),
        ({"varlen": None}, "varlen must be True or False, got None"),
        ({"phase": "prefil"}, "phase must be one of prefill, decode, got 'prefil'"),
        ({"device": "gpu"}, "device 'gpu' is not one that torch knows"),
        ({"device": "cuda:256"}, "device 'cuda:256' does not exist: torch has indices up to 127"),
        *(
            ({"dtype": dtype}, "dtype must be one of bfloat16, float16, float32, float64")
            for dtype in ("int8", torch.complex64, "float", torch.int8)  # row 21
        ),
    ],
    strip: [
        ({"attention_mask": None}, "attention_mask must be a tensor, got NoneType"),
        ({"attention_mask": [[1, 1]]}, "attention_mask must be a tensor, got list"),
        ({"x": [[1.0]]}, "x must be a tensor, got list"),
        (
            {"attention_mask": MASK[:, :3]},
            "attention_mask must be [B, S] for x [B, S, ...], got [1, 3] for x [1, 4, 2]",
        ),
        ({"x": MASK[0], "attention_mask": MASK[0]}, "must be [B, S] for x [B, S, ...], got [4]"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "row 0 has a gap"),
        *(
            (
                {"attention_mask": torch.tensor([[1, 1, number, 0]])},
                f"attention_mask must be bool, or integers 0 and 1, got {number} at index [0, 2]:",
                "number of its document",
                "pass cu_seqlens",
            )
            for number in (2, -1)
        ),
        *(
            ({"attention_mask": MASK.to(dtype)}, f"{name}: pass mask == 0 for an additive mask")
            for name in ("float32", "bfloat16", "float64")
            for dtype in (getattr(torch, name),)
        ),
    ],
    pad: [
        (
            {"rows": ROWS[:2], "indices": torch.arange(3), "batch": 2, "seq_len": 5},
            "got int64 [3] for 2 rows",
        ),
        (
            {"rows": ROWS[:2], "indices": torch.arange(2).int(), "batch": 2, "seq_len": 5},
            "indices must be int64 with one entry per row, got int32 [2]",
        ),
    ],
    replace_config: [
        (
            {"config": small(window_size=3)},
            "config of a layer cannot be replaced",
            "window_size=3",
            "create NSAttention(config), and load state_dict()",
        ),
    ],
}

# changes of packing arguments, and words of the message of the layer and of nsa_attention
PACKING = [
    ({"cu_seqlens": [0, 9]}, "int32 tensor [documents + 1], got list: pass torch.tensor(cu_seq"),
    ({"cu_seqlens": np.array([0, 9])}, "got ndarray: pass torch.tensor(cu_seqlens, dtype="),
    ({"cu_seqlens": torch.tensor([0, 9])}, "got cu_seqlens [2] int64 cpu: pass cu_seqlens.int()"),
    ({"cu_seqlens": torch.tensor([[0, 9]]).int()}, "an int32 tensor", "got cu_seqlens [1, 2]"),
    ({"cu_seqlens": torch.tensor([]).int()}, "must hold at least one document", "got [0]"),
    ({"cu_seqlens": torch.tensor([0]).int()}, "must hold at least one document", "got [1]"),
    ({"cu_seqlens": boundaries(9).to("meta")}, "cu_seqlens must be on cpu, got meta"),
    ({"cu_seqlens": boundaries(9).to_sparse()}, "pass cu_seqlens.to_dense()"),
    ({"cu_seqlens": torch.tensor([1, 9]).int()}, "cu_seqlens must start at 0, got 1"),
    ({"cu_seqlens": torch.tensor([0, 6, 4, 9]).int()}, "must not decrease, got 6 then 4"),
    ({"cu_seqlens": boundaries(8)}, "cu_seqlens must end at the 9 tokens given, got 8"),
    ({"max_seqlen": "20"}, "max_seqlen must be a host integer >= 0, got '20'"),
    ({"max_seqlen": 9.0}, "max_seqlen must be a host integer >= 0, got 9.0"),
    ({"max_seqlen": -1}, "max_seqlen must be a host integer >= 0, got -1"),
    ({"max_seqlen": True}, "max_seqlen must be a host integer >= 0, got True"),
    ({"max_seqlen": torch.tensor(9)}, "got a tensor: pass int(max_seqlen)"),
    (
        {"cu_seqlens": boundaries(5, 4), "max_seqlen": 4},
        "max_seqlen must be at least the longest document's 5 tokens, got 4",
    ),
]

# arguments of the layer that are refused with and without a cache
LAYER = [
    ({"x": None}, "x must be a tensor, got NoneType"),
    ({"x": X.numpy()}, "x must be a tensor, got ndarray"),
    ({"x": X.tolist()}, "x must be a tensor, got list"),
    ({"attention_mask": torch.ones(2, 9)}, "NSA is causal", "max_seqlen, indices = nsa_core.unpad"),
    ({"attn_mask": 1}, "attn_mask is not supported: NSA is causal", "nsa_core.unpad"),
    ({"past_key_values": ()}, "past_key_values is not supported: pass cache=", "new_cache()"),
    ({"use_cache": True}, "use_cache is not supported: pass cache="),
    ({"position_ids": torch.arange(9)}, "position_ids is not supported: ", "cu_seqlens="),
    ({"is_causal": False}, "is_causal must be True"),
    ({"need_weights": True}, "need_weights is not supported: ", "inspect_model"),
    ({"dropout_p": 0.1}, "dropout_p must be 0"),
    ({"encoder_hidden_states": 1}, "encoder_hidden_states: NSA is self-attention only"),
]

# plans that are refused by nsa_attention and by the layer
PLANS = [
    ({"plan": "sdpa"}, "plan must be what nsa_core.resolve() returns, got str"),
    (
        {"plan": resolve(CONFIG, dtype="float64", phase="decode")},
        "plan is for decode, but this call is a prefill: pass a plan resolved with",
    ),
]

# backends and configs that are refused by the layer and by a plan
BUILD = [
    ({"backends": ["sdpa"]}, "a name, or a mapping of slots to names, got ['sdpa']"),
    ({"backends": 3}, "backends must be None, a name, or a mapping of slots to names, got 3"),
    ({"backends": {"window": "sdpa"}}, "unknown slot 'window'; did you mean 'win'"),
    ({"backends": {"win": 3}}, "the backend of slot 'win' must be a name, got 3"),
    ({"backends": {3: "sdpa", "win": "sdpa"}}, "unknown slot 3"),
    (
        {"backends": {"win": "spda"}},
        "unknown backend 'spda'; did you mean 'sdpa'? (known: ",
        "sdpa",
    ),
    ({"backends": "SDPA"}, "unknown backend 'SDPA'; did you mean 'sdpa'?"),
    ({"backends": {"win": "sdpa", "sel": "nonesuch"}}, "unknown backend 'nonesuch' (known: "),
    ({"config": None}, "config must be an NSAConfig, got NoneType"),
    ({"config": {"dim": 64}}, "config must be an NSAConfig, got dict"),
]

TABLE = [
    *((attend, row) for row in SENTENCES),
    *((attend_short, row) for row in SENTENCES),
    *((call, row) for call, rows in INVALID.items() for row in rows),
    *(
        (call, ({**whole, "cu_seqlens": boundaries(9), **changes}, *words))
        for changes, *words in PACKING
        for call, whole in ((layer, {"x": ROWS}), (attend, inputs(CONFIG, 9)._asdict()))
    ),
    *((call, row) for row in LAYER for call in (layer, cached)),
    *((call, row) for row in PLANS for call in (attend, layer, cached)),
    *((call, row) for row in BUILD for call in (build, plan)),
]


@pytest.mark.filterwarnings("ignore")  # nested and sparse tensors warn
@pytest.mark.parametrize(
    ("call", "row"), TABLE, ids=[f"{call.__name__}-{row[1][:40]}" for call, row in TABLE]
)
def test_the_error_names_the_argument_and_the_fix(call, row, monkeypatch):
    changes, *words = row
    monkeypatch.setattr(attention, "default_plan", None)  # nothing is planned for a wrong call
    with record_dispatch() as calls, pytest.raises(InvalidInput) as caught:
        call(**changes)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not calls
    if any(row is whole for whole in SENTENCES):
        assert str(caught.value).partition(" (q [")[0] == words[0]


def test_compiled_calls_name_the_cause_too():
    compiled = torch.compile(attend_short, backend="eager")
    with pytest.raises(InvalidInput, match=re.escape("q looks like [B, H, S, D]")):
        compiled(**transposed("q"))


def test_the_layer_does_not_read_its_own_gates(monkeypatch):
    attn = layer_of()
    monkeypatch.setattr(torch.Tensor, "min", None)  # a sigmoid made them: they are not negative
    attn(X)


def test_an_unknown_keyword_suggests_a_similar_one():
    with pytest.raises(TypeError, match="unexpected keyword argument 'plna'; did you mean 'plan'"):
        layer(plna=None)


class Wrong(torch.nn.Module):
    """A gate of the user's own with an output that no kernel can read."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(torch.rand(*x.shape[:-1], 4, 3, dtype=x.dtype))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            torch.Tensor.float,
            "gates must be float64 beside float64 inputs, got float32: pass",
        ),
        (lambda g: g[:, :5], "gates have 5 tokens, but o_cmp, o_sel and o_win have 9 tokens"),
        (lambda g: g.flatten(-2), "gates must be [B, S, Hq, 3], got [2, 9, 12]"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_of_the_user_in_the_layer_is_checked(change, words, compiled):
    """The layer does not check the tensors that it made; the slots do."""
    attn = layer_of()
    attn.gate = Wrong(change)
    run = torch.compile(attn, backend="eager", dynamic=False) if compiled else attn
    with pytest.raises(Exception, match=re.escape(words)) as caught:
        run(X.requires_grad_(False))
    assert compiled or isinstance(caught.value, InvalidInput)


def problems_of(shapes, config):
    dtypes, cpu = {"blocks": torch.int32}, torch.device("cpu")
    tensors = {n: Metadata(s, dtypes.get(n, torch.float32), cpu) for n, s in shapes.items()}
    return call_problems("nsa_attention", tensors, Sizes(False, config))


def shapes_of(b, s, hq, g):
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
        assert problems_of(shapes_of(b, s, hq, g), config) == []


@pytest.mark.parametrize("names", [("q",), ("k", "v"), ("q", "k", "v"), ("q", "k", "v", "gates")])
def test_transposed_tensors_are_named_with_and_without_a_config(names):
    for hq, g in ((8, 2), (8, 1), (6, 3)):
        shapes = shapes_of(2, 37, hq, g)
        swapped = {n: (x[0], x[2], x[1], x[3]) if n in names else x for n, x in shapes.items()}
        for config in (None, small(n_heads=hq, n_kv_heads=g)):
            (sentence,) = problems_of(swapped, config)
            assert [n for n in shapes if f"{n}.transpose(1, 2)" in sentence] == list(names)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_autocast_does_not_cast_float64(dtypes):
    attn, x = layer_of(dtypes[0]), X.to(dtypes[1])
    message = f"x is {x.dtype}, the layer's parameters are {dtypes[0]}: convert one of them$"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidInput, match=message):
        attn(x)
