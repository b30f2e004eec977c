"""Integers beyond reason: refused at once and by name, whoever passes them."""

import functools
import json
import re
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from refusing import assert_refused

import nsa_core
from nsa_core import BlockGeometry, InvalidInput, NSAConfig, Request, pad, resolve
from nsa_core.cache.state import CacheSizes
from nsa_core.limits import (
    COUNT,
    HEADS,
    LAYERS,
    SEED,
    VOCABULARY,
    WIDTH,
    largest,
    read_at_most,
    shown,
)
from nsa_core.parallel.shards import Shards, choose_layout, pad_to

CONFIG = NSAConfig(dim=64, n_heads=4, n_kv_heads=2)
Q = torch.zeros(1, 8, 4, 16)
KV = torch.zeros(1, 8, 2, 16)
GATES = torch.zeros(1, 8, 4, 3)
BLOCKS = torch.zeros(1, 8, 2, 1, dtype=torch.int32)
LENGTHS = torch.tensor([8], dtype=torch.int32)
PACKED = {"cu_seqlens": torch.tensor([0, 8], dtype=torch.int32)}


@functools.cache
def _layer() -> Any:
    return nsa_core.NSAttention(CONFIG)


@functools.cache
def _cache() -> Any:
    return _layer().new_cache(2, 64)


def _hf(name: str, value: object) -> object:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return NSAConfig.from_hf({**sizes, name: value})


def _json(name: str, value: object) -> object:
    """Read the number from JSON, as from a config.json."""
    return _hf(name, json.loads(json.dumps(value)))


# argument -> the limit that the issue states
SIZES = {"dim": 2**20, "n_heads": 4096, "n_kv_heads": 4096, "head_dim": 2**20, "v_head_dim": 2**20}
BLOCK_FIELDS = dict.fromkeys(
    (
        *("compress_block_size", "compress_stride", "select_block_size"),
        *("num_selected_blocks", "init_blocks", "local_blocks", "window_size"),
    ),
    2**31 - 1,
)
TOKENS = 2**31 - 1
HEADS_OF_REQUEST = {name: limit for name, limit in SIZES.items() if name != "dim"}
# call -> (how to pass a value under a name, the names and their limits)
CALLS: Mapping[str, tuple[Callable[[str, Any], object], Mapping[str, int]]] = {
    "NSAConfig": (
        lambda name, value: NSAConfig(**{"dim": 64, "n_heads": 4, "n_kv_heads": 2, name: value}),
        SIZES | BLOCK_FIELDS,
    ),
    "BlockGeometry": (lambda name, value: BlockGeometry(**{name: value}), BLOCK_FIELDS),
    "Request": (
        lambda name, value: Request(
            **{
                **{"slot": "win", "geometry": BlockGeometry(), "n_heads": 4, "n_kv_heads": 2},
                **{"head_dim": 16, "v_head_dim": 16, name: value},
            }
        ),
        HEADS_OF_REQUEST | dict.fromkeys(("batch", "seq_len", "page_size"), TOKENS),
    ),
    "resolve": (
        lambda name, value: resolve(CONFIG, **{name: value}),
        dict.fromkeys(("batch", "seq_len", "page_size"), TOKENS),
    ),
    "nsa_attention": (
        lambda name, value: nsa_core.nsa_attention(Q, KV, KV, GATES, **{name: value}),
        BLOCK_FIELDS,
    ),
    "nsa_attention, packed": (
        lambda name, value: nsa_core.nsa_attention(
            Q[0], KV[0], KV[0], GATES[0], config=CONFIG, **PACKED, **{name: value}
        ),
        {"max_seqlen": TOKENS},
    ),
    "NSAttention, packed": (
        lambda name, value: _layer()(torch.empty(8, 64), **PACKED, **{name: value}),
        {"max_seqlen": TOKENS},
    ),
    "block_attention": (
        lambda name, value: nsa_core.block_attention(
            Q, KV, KV, BLOCKS, **{"block_size": 4, name: value}
        ),
        {"block_size": TOKENS, "first_query": TOKENS},
    ),
    "block_attention_decode": (
        lambda name, value: nsa_core.block_attention_decode(
            Q, KV, KV, BLOCKS, lengths=LENGTHS, **{name: value}
        ),
        {"block_size": TOKENS},
    ),
    "plan_block_attention": (
        lambda name, value: nsa_core.plan_block_attention(
            **{
                **{"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "block_size": 4, "n_blocks": 1},
                **{"phase": "decode", "page_size": 4, name: value},
            }
        ),
        HEADS_OF_REQUEST | dict.fromkeys(("block_size", "n_blocks", "page_size", "batch"), TOKENS),
    ),
    "new_cache": (
        lambda name, value: _layer().new_cache(
            **{"batch": 2, "max_len": 64, "page_size": 64, "num_pages": 2, name: value}
        ),
        dict.fromkeys(
            ("batch", "max_len", "page_size", "num_pages", "max_rollback", "max_step"), TOKENS
        ),
    ),
    "crop": (lambda name, value: _cache().crop(value), {"lengths": TOKENS}),
    "reserve": (lambda name, value: _cache().reserve(value), {"tokens": TOKENS}),
    "pad": (
        lambda name, value: nsa_core.pad(
            Q[0], PACKED["cu_seqlens"], **{"batch": 1, "seq_len": 8, name: value}
        ),
        {"batch": TOKENS, "seq_len": TOKENS},
    ),
    "pad_to": (
        lambda name, value: pad_to(**{"total": 8, "world": 2, name: value}),
        {"total": TOKENS, "world": TOKENS},
    ),
    "Shards": (
        lambda name, value: Shards(**{"total": 8, "world": 2, "rank": 0, name: value}),
        {"total": TOKENS, "world": TOKENS, "rank": TOKENS},
    ),
    "choose_layout": (
        lambda name, value: choose_layout([4, value], 2, CONFIG),
        {"lengths[1]": TOKENS},
    ),
}
WORDS_OF_HF = {
    "hidden_size": ("dim", 2**20),
    "num_attention_heads": ("n_heads", 4096),
    "num_key_value_heads": ("n_kv_heads", 4096),
    "head_dim": ("head_dim", 2**20),
}
ROWS = [
    pytest.param(functools.partial(call, name), name, limit, id=f"{function}-{name}")
    for function, (call, names) in CALLS.items()
    for name, limit in names.items()
] + [
    pytest.param(functools.partial(reader, name), word, limit, id=f"from_hf-{name}-{source}")
    for source, reader in (("mapping", _hf), ("json", _json))
    for name, (word, limit) in WORDS_OF_HF.items()
]


def test_a_short_file_takes_little_memory_however_long_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"0123456789" * 300_000)
    tracemalloc.start()
    try:
        assert read_at_most(path, 1 << 30) == path.read_bytes()
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()
    assert len(read_at_most(path, 3 << 20)) == 3_000_000
    with pytest.raises(InvalidInput, match="has more than 2 MiB"):
        read_at_most(path, 2 << 20)


def test_the_table_is_that_of_the_documentation() -> None:
    assert (COUNT, HEADS, WIDTH, LAYERS) == (2**31 - 1, 4096, 2**20, 1024)
    assert (VOCABULARY, SEED) == (2**24, 2**63 - 1)


@pytest.mark.parametrize(("call", "name", "limit"), ROWS)
def test_a_number_out_of_range_is_refused(
    call: Callable[[Any], object], name: str, limit: int
) -> None:
    """One past the limit, numbers that fit no machine integer or no screen, and no counts."""
    for value in (limit + 1, 10**400):
        assert_refused(lambda v=value: call(v), name, f"<= {limit}", shown(value))
    for value in (True, 1e9, -1, float("nan"), -(10**400)):
        assert_refused(lambda v=value: call(v), name, shown(value))


def test_a_number_that_python_cannot_print_is_refused() -> None:
    for call, names in CALLS.values():
        for name, limit in names.items():
            assert_refused(lambda c=call, n=name: c(n, 10**5000), f"<= {limit}", "about 1e5000")
            with pytest.raises(InvalidInput):
                call(name, [10**5000])


@pytest.mark.parametrize("value", [numpy.int64(7), numpy.float32(7.0), numpy.array([7])], ids=repr)
def test_a_config_takes_no_numpy_number(value: object) -> None:
    """Python's integers alone: a config is hashed, compared and written as JSON."""
    assert_refused(lambda: NSAConfig(dim=64, n_heads=4, n_kv_heads=2, window_size=value), "window")


def test_the_limits_themselves_are_valid() -> None:
    for name, limit in BLOCK_FIELDS.items():
        sizes = dict.fromkeys(
            ("compress_block_size", "compress_stride", "select_block_size"), limit
        )
        sizes |= {} if name in sizes else {name: limit}
        sizes |= {"init_blocks": 0, "local_blocks": limit} if name == "local_blocks" else {}
        if name in ("init_blocks", "local_blocks"):
            sizes |= {
                "init_blocks": 0,
                "local_blocks": 0,
                "num_selected_blocks": limit,
                name: limit,
            }
        assert getattr(NSAConfig(dim=2**20, n_heads=4096, n_kv_heads=4096, **sizes), name) == limit
    config = NSAConfig(2**20, 4096, 4096, 2**20, 2**20)
    assert (config.qk_dim, config.v_dim) == (2**20, 2**20)
    Request(
        slot="win",
        geometry=config.geometry,
        n_heads=4096,
        n_kv_heads=4096,
        head_dim=2**20,
        v_head_dim=2**20,
        batch=TOKENS,
        seq_len=TOKENS,
    )
    CacheSizes(1, TOKENS, max_rollback=TOKENS, max_step=TOKENS).check()
    assert pad_to(TOKENS - 1, 1) == TOKENS - 1


def test_a_plan_for_the_largest_window_and_blocks_is_made() -> None:
    """The causal kernel of sel has a window of n * l' tokens, which no sequence is longer than."""
    config = NSAConfig(64, 4, 2, num_selected_blocks=TOKENS, window_size=TOKENS)
    assert resolve(config, seq_len=TOKENS, batch=1).causal_up_to == TOKENS


@pytest.mark.parametrize(
    ("function", "sizes", "product"),
    [
        ("new_cache", {"batch": 2**16, "max_len": 2**16}, "batch * max_len"),
        (
            "new_cache",
            {"batch": 1, "max_len": 64, "page_size": 2**16, "num_pages": 2**16},
            "num_pages * page_size",
        ),
        ("pad", {"batch": 2**16, "seq_len": 2**16}, "batch * seq_len"),
    ],
)
def test_products_of_sizes_are_below_2_31(
    function: str, sizes: dict[str, int], product: str
) -> None:
    rows, indices = Q[0], PACKED["cu_seqlens"]
    call = _layer().new_cache if function == "new_cache" else lambda **s: pad(rows, indices, **s)
    assert_refused(lambda: call(**sizes), f"{product} must be <= {TOKENS}, got {2**32}")


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 10**5000, "256", True, 0, float("inf")], ids=shown
)
def test_from_hf_refuses_a_scale_that_is_no_number(value: object) -> None:
    with pytest.raises(InvalidInput, match="query_pre_attn_scalar must be a finite number > 0"):
        _hf("query_pre_attn_scalar", value)
    assert _hf("query_pre_attn_scalar", 256).scale == 1 / 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", ["rope_base", "scale", "dropout"])
def test_a_real_number_of_thousands_of_digits_is_refused(field: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape("about 1e5000")):
        NSAConfig(64, 4, 2, **{field: 10**5000})  # type: ignore[arg-type]


def test_unknown_names_have_the_limit_of_tokens() -> None:
    assert largest("steps") == COUNT
    assert largest("hidden_size") == WIDTH


@pytest.mark.parametrize("kind", ["mlp", "linear", "conv", "attn_pool"])
def test_a_phi_with_gigabytes_of_parameters_is_refused(kind: str) -> None:
    config = NSAConfig(64, 4, 2, **dict.fromkeys(SIZES_OF_BLOCKS, 10**9), compress=kind)
    message = rf"\* head width must be <= {WIDTH} for compress={kind!r}, .* got {10**9} \* 16"
    with pytest.raises(InvalidInput, match=message):
        nsa_core.NSAttention(config)


SIZES_OF_BLOCKS = ("compress_block_size", "compress_stride", "select_block_size")


def test_a_selection_block_of_too_many_compressed_blocks_is_refused() -> None:
    assert BlockGeometry(16, 16, 16 * 2**16)
    assert_refused(
        lambda: BlockGeometry(16, 16, 16 * 2**16 + 16),
        f"select_block_size must be <= 65536 * compress_stride, got {2**20 + 16} and 16",
    )


@pytest.mark.parametrize("size", [2**16, 2**18, 10**9, 2**31 - 1])
@pytest.mark.parametrize("tokens", [41, 700])
def test_a_block_longer_than_the_keys_takes_no_memory_for_the_rest(tokens: int, size: int) -> None:
    q, k = torch.randn(1, tokens, 4, 8), torch.randn(1, tokens, 2, 8)
    blocks = torch.tensor([0, 1, 10**6]).expand(1, tokens, 2, 3)
    expected = nsa_core.block_attention(q, k, k, blocks[..., :1] * 0, block_size=1024)
    o = nsa_core.block_attention(q, k, k, blocks, block_size=size)
    assert torch.allclose(o, expected, atol=1e-6)
