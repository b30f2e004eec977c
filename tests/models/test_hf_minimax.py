"""MiniMax-M3 with "nsa_blocks": the same outputs and gradients as transformers' eager attention.

Bounds are for the model of the fixture: logits of about 1, gradients of about 0.005, float32.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    MiniMaxM3VLVisionConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
    apply_rotary_pos_emb,
)

from hf_models import trained
from nsa_core import block_attention_with_lse
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_models.hf import minimax
from nsa_models.recipes.indexer_loss import indexer_loss
from nsa_verify.judge.slot import judge_slot

SIZE, TOKENS = 16, 150
LOGITS, GRADIENTS = 1e-6, 1e-8
minimax.register()

# padding on the left, padding on the right, whether positions count tokens only
ROWS = {
    "no padding": (0, 0, False),
    "right": (0, 37, False),
    "left": (37, 0, False),
    "left, own positions": (9, 0, True),
}
LEFT = pytest.mark.filterwarnings("ignore:rows are padded on the left")


def text_config(**changes: Any) -> MiniMaxM3VLTextConfig:
    """Return a config of one dense layer and two whose indexer chooses 4 blocks of 16 keys."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_block_size": SIZE,
        "index_topk_blocks": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return MiniMaxM3VLTextConfig(**(sizes | changes))


def new_model(**changes: Any) -> MiniMaxM3VLForCausalLM:
    torch.manual_seed(0)
    return MiniMaxM3VLForCausalLM(text_config(**changes)).float().eval()


@pytest.fixture(scope="module")
def model() -> MiniMaxM3VLForCausalLM:
    return new_model()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 128, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def inputs(left: int, right: int, own_positions: bool) -> dict[str, torch.Tensor]:
    """Return the arguments of a batch whose first row is padded."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :left] = 0
    mask[0, TOKENS - right :] = 0
    if own_positions:
        return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return {"attention_mask": mask} if left or right else {}


def run(
    model: MiniMaxM3VLForCausalLM, name: str, ids: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all tokens, and the gradients of their mean square."""
    model.set_attn_implementation(name)
    model.zero_grad()
    logits = model(ids, **options).logits
    if "attention_mask" in options:
        logits = logits[options["attention_mask"].bool()]
    logits.square().mean().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach(), torch.cat(gradients)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Compare logits [.., V] and gradients."""
    assert difference(found[0].flatten(0, -2), expected[0].flatten(0, -2)) < LOGITS
    assert difference(found[1], expected[1]) < GRADIENTS


@LEFT
@pytest.mark.parametrize("rows", ROWS)
def test_logits_and_gradients_match_eager(model, tokens, rows):
    options = inputs(*ROWS[rows])
    expected = run(model, "eager", tokens, **options)
    assert float(expected[0].abs().max()) > 0.3
    assert_same(run(model, "nsa_blocks", tokens, **options), expected)


def test_the_layers_with_an_indexer_run_block_attention(model, tokens, monkeypatch):
    calls = []

    def record(*arguments: torch.Tensor, **options: Any) -> Any:
        calls.append((arguments[3].shape, options["block_size"], options["first_query"]))
        return block_attention_with_lse(*arguments, **options)

    block_attention_with_lse = minimax.block_attention_with_lse
    monkeypatch.setattr(minimax, "block_attention_with_lse", record)
    model.set_attn_implementation("nsa_blocks")
    with torch.no_grad():
        model(tokens[:, :20])
    # 20 keys are 2 blocks; a fixed number of columns needs one plan and one kernel
    assert calls == [((2, 20, 2, 4), SIZE, 0)] * 2


@LEFT
def test_queries_whose_blocks_hold_no_token_match_eager(model, tokens):
    """transformers counts blocks from the padding: the first tokens see only padding."""
    options = inputs(40, 0, True)
    with torch.no_grad():
        model.set_attn_implementation("nsa_blocks")
        logits = model(tokens, **options).logits
        model.set_attn_implementation("eager")
        assert difference(logits, model(tokens, **options).logits) < LOGITS


def in_parts(
    model: MiniMaxM3VLForCausalLM, ids: torch.Tensor, **options: torch.Tensor
) -> torch.Tensor:
    """Return the logits of a prompt, a chunk and single tokens over a cache."""
    cache, bounds, logits = DynamicCache(config=model.config), [0, 70, 147, 148, 149, 150], []
    for start, end in itertools.pairwise(bounds):
        part = {
            name: x[:, :end] if name == "attention_mask" else x[:, start:end]
            for name, x in options.items()
        }
        logits.append(model(ids[:, start:end], past_key_values=cache, **part).logits)
    return torch.cat(logits, 1)


@LEFT
@pytest.mark.parametrize("rows", ROWS)
@torch.no_grad()
def test_a_cache_changes_nothing(model, tokens, rows):
    """Rows padded on the left see other blocks without a cache, in eager attention as well."""
    options = inputs(*ROWS[rows])
    usable = options.get("attention_mask", torch.ones_like(tokens)).bool()
    model.set_attn_implementation("nsa_blocks")
    logits = in_parts(model, tokens, **options)[usable]
    whole = model(tokens, **options).logits[usable]
    model.set_attn_implementation("eager")
    assert difference(logits, in_parts(model, tokens, **options)[usable]) < LOGITS
    if "left" not in rows:
        assert difference(logits, whole) < LOGITS


GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "assisted": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.few_cases
@LEFT
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (rows, o)
        for rows in ("no padding", "left")
        for o in GENERATION
        if (rows, o) != ("left", "no cache")
    ],
)
def test_generation_matches_eager(model, tokens, rows, options):
    results, options = {}, GENERATION[options]
    left = 9 if rows == "left" else 0
    mask = inputs(left, 0, True)["attention_mask"]
    if "prompt_lookup_num_tokens" in options:  # one row, whose text repeats
        mask, tokens = mask[:1], tokens[:1, : TOKENS // 2].repeat(1, 2)
    for name in ("eager", "nsa_blocks"):
        model.set_attn_implementation(name)
        results[name] = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    assert torch.equal(results["nsa_blocks"].sequences, results["eager"].sequences)
    for logits, expected in zip(results["nsa_blocks"].logits, results["eager"].logits):
        assert difference(logits, expected) < 2 * LOGITS


@pytest.mark.few_cases("40")
@pytest.mark.parametrize("queries", [TOKENS, 40])
def test_bfloat16_passes_the_verdict(model, tokens, monkeypatch, queries):
    """The attention of each sparse layer, given its own q, k, v and blocks, against float64."""
    seen = []

    def record(module, query, key, value, attention_mask, **options):
        if options["block_indices"] is not None:
            seen.append([query, key, value, options["block_indices"]])
        return minimax.attend(module, query, key, value, attention_mask, **options)

    low = copy.deepcopy(model).to(torch.bfloat16)
    monkeypatch.setitem(minimax.AttentionInterface._global_mapping, "nsa_blocks", record)
    low.set_attn_implementation("nsa_blocks")
    cache = DynamicCache(config=low.config)
    with torch.no_grad():
        for part in tokens.split([TOKENS - queries, queries], 1):
            if part.shape[1]:
                low(part, past_key_values=cache)
    layers = [layer.self_attn for layer in low.model.layers[1:]]
    for layer, (query, key, value, blocks) in zip(layers, seen[-2:], strict=True):
        assert query.dtype == torch.bfloat16
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        scale = query.shape[-1] ** -0.5
        output = minimax.attend(layer, *leaves, None, scaling=scale, block_indices=blocks)[0]
        do = torch.randn(output.shape).to(output.dtype)
        gradients = torch.autograd.grad(output, leaves, do)
        names = ("q", "k", "v")
        slot_inputs = {n: x.detach().transpose(1, 2) for n, x in zip(names, leaves)}
        slot_inputs["blocks"] = blocks.transpose(1, 2)
        outputs = {"o": output.detach()}
        outputs |= {f"d{n}": x.transpose(1, 2) for n, x in zip(names, gradients)}
        n = blocks.shape[-1]
        geometry = BlockGeometry(SIZE, SIZE, SIZE, n, 0, 0, 1)
        verdicts = judge_slot(
            "sel", slot_inputs, outputs, geometry, scale, do=do, first_query=TOKENS - queries
        )
        assert set(verdicts) == {"o", "dq", "dk", "dv"}
        assert all(verdicts.values()), verdicts


def test_autocast_computes_in_its_dtype(model, tokens, monkeypatch):
    """Norms and rotations leave q and k in float32, and v is in bfloat16."""
    dtypes = []

    def record(*qkv_and_blocks, **options):
        dtypes.extend(x.dtype for x in qkv_and_blocks[:3])
        return block_attention_with_lse(*qkv_and_blocks, **options)

    monkeypatch.setattr(minimax, "block_attention_with_lse", record)
    low, cache = copy.deepcopy(model), DynamicCache(config=model.config)
    with torch.autocast("cpu", torch.bfloat16):
        logits, gradients = run(low, "nsa_blocks", tokens, use_cache=False)
        with torch.no_grad():
            low(tokens[:, :-1], past_key_values=cache)
            step = low(tokens[:, -1:], past_key_values=cache).logits
    assert set(dtypes) == {torch.bfloat16}
    assert difference(step, logits[:, -1:]) < 0.02
    assert bool(gradients.isfinite().all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_training_follows_eager(tokens):
    """With AdamW, gradient checkpointing and padding on the right."""
    losses = {}
    mask = inputs(0, 37, False)["attention_mask"]
    labels = tokens.masked_fill(mask == 0, -100)
    for name in ("eager", "nsa_blocks"):
        model = new_model().train()
        model.set_attn_implementation(name)
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses[name] = []
        for _ in range(8):
            loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(float(loss.detach()))
    assert losses["eager"][-1] < losses["eager"][0] - 0.3
    assert max(abs(a - b) for a, b in zip(*losses.values())) < 1e-4


@pytest.mark.slow
def test_the_trainer_with_lora_follows_eager(tokens, tmp_path):
    data = [{"input_ids": row, "labels": row} for row in tokens[:, :100].tolist()] * 4
    losses = {}
    for name in ("eager", "nsa_blocks"):
        base = new_model()
        base.set_attn_implementation(name)
        before = {n: p.detach().clone() for n, p in base.named_parameters()}
        model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
        _, losses[name] = trained(model, data, tmp_path / name, learning_rate=0.02)
        merged = model.merge_and_unload().state_dict()
        changed = {n.split(".")[-2] for n, p in before.items() if not torch.equal(merged[n], p)}
        assert changed == {"q_proj", "v_proj"}
    assert losses["eager"][-1] < losses["eager"][0] - 0.1
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-4


def test_images_run_dense_attention():
    vision = MiniMaxM3VLVisionConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        patch_size=4,
        image_size=16,
    )
    config = MiniMaxM3VLConfig(
        text_config=text_config().to_dict(),
        vision_config=vision.to_dict(),
        image_token_index=120,
        video_token_index=121,
        projector_hidden_size=64,
    )
    torch.manual_seed(0)
    model = MiniMaxM3SparseForConditionalGeneration(config).float().eval()
    ids = torch.randint(3, 100, (1, 40))
    ids[0, 3:7] = 120  # 16 patches, merged 2 by 2
    pixels = torch.randn(16, 3 * 2 * 4 * 4)
    logits = {}
    for name in ("eager", "nsa_blocks"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(
                input_ids=ids, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]])
            ).logits
    assert difference(*logits.values()) < LOGITS


def indexer_gradients(model: MiniMaxM3VLForCausalLM) -> torch.Tensor:
    named = model.named_parameters()
    return torch.cat([p.grad.flatten() for n, p in named if "indexer" in n and p.grad is not None])


def test_the_indexer_gets_the_gradient_of_its_loss(tokens, monkeypatch):
    """Two layers, against states that choose the blocks which the indexer chose."""
    model, seen = new_model(), []
    _, before = run(model, "nsa_blocks", tokens, use_cache=False)
    assert all(p.grad is None for n, p in model.named_parameters() if "indexer" in n)

    def record(module, query, key, value, attention_mask, **options):
        if options["block_indices"] is not None:
            seen.append((query, key, options["block_indices"]))
        return minimax.attend(module, query, key, value, attention_mask, **options)

    monkeypatch.setitem(minimax.AttentionInterface._global_mapping, "nsa_blocks", record)
    inputs_seen: list[Any] = []
    indexers = [layer.self_attn.indexer for layer in model.model.layers[1:]]
    for indexer in indexers:
        indexer.register_forward_pre_hook(lambda _, x: inputs_seen.append(x))
    minimax.train_indexer(model, 0.5)
    run(model, "nsa_blocks", tokens, use_cache=False)
    named = dict(model.named_parameters())
    others = [p.grad for n, p in named.items() if "indexer" not in n and p.grad is not None]
    assert difference(torch.cat([x.flatten() for x in others]), before) < GRADIENTS
    for indexer, (query, key, blocks), x in zip(indexers, seen, inputs_seen, strict=True):
        hidden, (cos, sin) = x[0].detach(), x[1]
        q = indexer.q_norm(indexer.q_proj(hidden).view(2, TOKENS, 2, 32)).transpose(1, 2)
        k = indexer.k_norm(indexer.k_proj(hidden).view(2, TOKENS, 1, 32)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        scores = (q @ k.mT).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
        scores = torch.nn.functional.pad(scores, (0, 10), value=-torch.inf)
        best = scores.unflatten(-1, (10, SIZE)).amax(-1)[:, :, -1, :-1].topk(3).indices
        assert torch.equal(best.sort().values, blocks[:, :, -1].sort().values[..., :3])
        loss = indexer_loss(
            query.transpose(1, 2),
            key.transpose(1, 2),
            q.transpose(1, 2),
            k[:, 0],
            blocks.transpose(1, 2),
            block_size=SIZE,
        )
        assert loss.item() > 0.001
        assert abs(indexer.last_loss.item() - loss.item()) < 1e-6
        expected = torch.autograd.grad(0.5 * loss, list(indexer.parameters()))
        for p, gradient in zip(indexer.parameters(), expected, strict=True):
            assert float(gradient.abs().max()) > 1e-5
            assert difference(p.grad, gradient) < GRADIENTS
    minimax.train_indexer(model, 0)
    run(model, "nsa_blocks", tokens, use_cache=False)
    assert all(p.grad is None for n, p in model.named_parameters() if "indexer" in n)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_indexer_trains_on_packed_documents(tokens, checkpointed):
    model, gradients = new_model().train(), []
    minimax.train_indexer(model)
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids = tokens[:1]
    for part in (ids[:, :100], ids[:, 100:]):
        run(model, "nsa_blocks", part, use_cache=False)
        gradients.append(indexer_gradients(model) * part.shape[1] / TOKENS)
    run(model, "nsa_blocks", ids, use_cache=False, **packed([[100, 50]]))
    assert float(sum(gradients).abs().max()) > 1e-4
    assert difference(indexer_gradients(model), sum(gradients)) < 1e-6  # they are about 0.03


@pytest.mark.slow
def test_the_trainer_trains_the_indexer(tokens, tmp_path):
    data = [{"input_ids": row, "labels": row} for row in tokens.tolist()] * 4
    model = new_model()
    model.set_attn_implementation("nsa_blocks")
    minimax.train_indexer(model)
    indexer, losses = model.model.layers[1].self_attn.indexer, []
    indexer.register_forward_pre_hook(
        lambda module, _: losses.append(float(getattr(module, "last_loss", torch.inf)))
    )
    trained(model, data, tmp_path, max_steps=12, learning_rate=0.01)
    assert losses[-1] < 0.7 * losses[1]


@LEFT
def test_what_cannot_train_the_indexer_is_refused(tokens):
    model = new_model()
    minimax.train_indexer(model)
    model.set_attn_implementation("nsa_blocks")
    with pytest.raises(InvalidInput, match="rows without padding on the left"):
        model(tokens, use_cache=False, **inputs(9, 0, False))
    with pytest.raises(InvalidInput, match="Linear has no indexer of MiniMax-M3"):
        minimax.train_indexer(torch.nn.Linear(1, 1))


def test_left_padding_warns_once_per_prompt_and_right_padding_does_not(model, tokens):
    model.set_attn_implementation("nsa_blocks")
    with pytest.warns(UserWarning, match="padded on the left") as caught, torch.no_grad():
        model(tokens, **inputs(9, 0, False))
    assert len(caught) == 1
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(tokens, **inputs(0, 37, False))


@LEFT
@torch.no_grad()
def test_rows_padded_on_the_left_equal_unpadded_rows_without_a_cache(model, tokens):
    options = {**inputs(9, 0, True), "use_cache": False}
    model.set_attn_implementation("nsa_blocks")
    logits = model(tokens, **options).logits
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "use_cache": False}
    texts = model.generate(tokens, attention_mask=options["attention_mask"], **settings)
    model.set_attn_implementation("eager")
    for row, left in enumerate((9, 0)):
        ids = tokens[row : row + 1, left:]
        expected = model(ids, use_cache=False).logits
        assert difference(logits[row : row + 1, left:], expected) < LOGITS
        assert torch.equal(texts[row, left:], model.generate(ids, **settings)[0])


# lengths of the documents of each row
PACKED = {
    "one row": [[40, 1, 70, 39]],
    "two rows": [[100, 50], [150]],
    "single tokens": [[1, 1, 1, 147], [148, 1, 1]],
}


def packed(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return positions that start again at each document, and the boundaries."""
    lengths = torch.tensor([0, *itertools.chain(*rows)])
    bounds = lengths.cumsum(0).to(torch.int32)
    positions = [torch.cat([torch.arange(n) for n in row]) for row in rows]
    return {
        "position_ids": torch.stack(positions),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


def separate(
    model: MiniMaxM3VLForCausalLM, ids: torch.Tensor, rows: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [B, S, V] and gradients of the documents, each one alone in eager attention."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    parts = [part for row, lengths in zip(ids, rows) for part in row.split(lengths)]
    logits = torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])
    logits.square().mean().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits.detach().unflatten(0, ids.shape), torch.cat(gradients)


@pytest.mark.parametrize("boundaries", [True, False], ids=["boundaries", "positions"])
@pytest.mark.parametrize("rows", PACKED)
def test_packed_documents_equal_separate_ones(model, tokens, rows, boundaries):
    lengths = PACKED[rows]
    ids = tokens[: len(lengths)]
    options = packed(lengths)
    if not boundaries:
        options = {"position_ids": options["position_ids"]}
    found = run(model, "nsa_blocks", ids, use_cache=False, **options)
    assert_same(found, separate(model, ids, lengths))


@pytest.mark.parametrize(("heads", "chosen"), [(2, 1), (4, 2), (2, 4)])
def test_the_indexer_may_have_fewer_or_more_heads(tokens, heads, chosen):
    model = new_model(num_key_value_heads=heads, index_n_heads=chosen)
    assert_same(run(model, "nsa_blocks", tokens), run(model, "eager", tokens))
    found = run(model, "nsa_blocks", tokens[:1], use_cache=False, **packed([[100, 50]]))
    assert_same(found, separate(model, tokens[:1], [[100, 50]]))


def test_packed_documents_with_padding_on_the_right(model, tokens):
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    mask[:, 120:] = 0
    options = packed([[80, 40, 30]])
    position_ids = options["position_ids"].masked_fill(mask == 0, 1)
    padded = {"attention_mask": mask, "position_ids": position_ids}
    found = run(model, "nsa_blocks", tokens[:1], use_cache=False, **padded)
    assert_same(found, separate(model, tokens[:1, :120], [[80, 40]]))


def test_positions_may_begin_anywhere(model, tokens):
    """Rotary angles are relative, and the blocks count from the first token."""
    position_ids = torch.cat([torch.arange(5, 105), torch.arange(7, 57)])[None]
    logits, _ = run(model, "nsa_blocks", tokens[:1], use_cache=False, position_ids=position_ids)
    expected, _ = separate(model, tokens[:1], [[100, 50]])
    assert difference(logits, expected) < 5 * LOGITS


def test_checkpointed_layers_keep_documents_apart(tokens):
    model = new_model().train()
    model.gradient_checkpointing_enable()
    found = run(model, "nsa_blocks", tokens[:1], use_cache=False, **packed([[100, 50]]))
    model.gradient_checkpointing_disable()
    assert_same(found, separate(model, tokens[:1], [[100, 50]]))


@pytest.mark.slow
def test_the_trainer_packs_documents(tokens, tmp_path):
    """Two documents in one row, as the collator passes them, train as two rows do."""
    data = [{"input_ids": row, "labels": row} for row in tokens[:, :100].tolist()] * 4
    losses = {}
    for name, collator in (("eager", None), ("nsa_blocks", DataCollatorWithFlattening())):
        model = new_model()
        model.set_attn_implementation(name)
        if collator is not None:
            collator.return_flash_attn_kwargs = True
        _, losses[name] = trained(model, data, tmp_path / name, collator, learning_rate=0.01)
    assert losses["eager"][-1] < losses["eager"][0] - 0.1
    assert max(abs(a - b) for a, b in zip(*losses.values(), strict=True)) < 1e-4


def test_other_implementations_choose_the_blocks_of_transformers(model, tokens):
    """register() changes the choice of the blocks under "nsa_blocks" only."""
    positions = packed([[100, 50]])["position_ids"]
    model.set_attn_implementation("eager")
    indexer = model.model.layers[1].self_attn.indexer
    hidden = torch.randn(1, TOKENS, 64)
    angles = model.model.rotary_emb(hidden, positions)
    blocks = indexer(hidden, angles, None, positions)
    assert int(blocks[0, 0, 110].max()) == 0  # it takes position 10 for row 10
    model.set_attn_implementation("nsa_blocks")
    assert torch.equal(indexer(hidden, angles, None, positions)[0, 0, 100], blocks[0, 0, 0])
    assert int(indexer(hidden, angles, None, positions)[0, 0, 149].max()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_ids": None}, "position_ids do not start again where cu_seq_lens_q says"),
        (
            dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 50, 150])),
            "position_ids do not start again where cu_seq_lens_q says",
        ),
        ({"cu_seq_lens_k": torch.tensor([0, 50, 150])}, "cu_seq_lens_q and cu_seq_lens_k differ"),
        ({"use_cache": True}, "documents packed in a row .* pass use_cache=False"),
    ],
)
def test_boundaries_that_cannot_be_kept_are_refused(model, tokens, changes, message):
    model.set_attn_implementation("nsa_blocks")
    options = {**packed([[100, 50]]), "use_cache": False, **changes}
    for call in (model, model.model):
        with pytest.raises(InvalidInput, match=message):
            call(tokens[:1], **options)


def test_packed_chunks_over_a_cache_are_refused(model, tokens):
    model.set_attn_implementation("nsa_blocks")
    cache = DynamicCache(config=model.config)
    model(tokens[:1, :50], past_key_values=cache)
    positions = torch.cat([torch.arange(50, 60), torch.arange(10)])[None]
    with pytest.raises(InvalidInput, match="pass use_cache=False"):
        model(tokens[:1, 50:70], past_key_values=cache, position_ids=positions)


@pytest.mark.parametrize("kind", ["sliding", "bidirectional images", "packed and sliding"])
def test_masks_of_other_models_are_refused(kind):
    """As a mask function of transformers, called as its models do."""
    config = text_config()
    config._attn_implementation = "nsa_blocks"
    x = torch.zeros(1, 8, 64)
    arguments: dict[str, Any] = {"attention_mask": None, "past_key_values": None}
    create = create_causal_mask
    if kind == "bidirectional images":
        arguments["or_mask_function"] = lambda b, h, q, k: q == k
    else:
        config.sliding_window, create = 4, create_sliding_window_causal_mask
    if kind == "packed and sliding":
        arguments["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(InvalidInput, match="takes causal masks, padding and packed documents"):
        create(config, x, **arguments)


def test_a_mask_of_pairs_is_refused(model, tokens):
    model.set_attn_implementation("nsa_blocks")
    mask = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool)
    with pytest.raises(InvalidInput, match=r"got attention_mask of shape \[2, 1, 150, 150\]"):
        model(tokens, attention_mask=mask)


def test_dropout_is_refused(tokens):
    model = new_model(attention_dropout=0.1).train()
    model.set_attn_implementation("nsa_blocks")
    with pytest.raises(InvalidInput, match=r"got dropout 0\.1; set config\.attention_dropout to 0"):
        model(tokens)


def test_heads_that_do_not_divide_are_refused(tokens):
    model = new_model(index_n_heads=3)
    model.set_attn_implementation("nsa_blocks")
    with pytest.raises(InvalidInput, match="must divide one another, got 3 and 2"):
        model(tokens)


@LEFT
@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
def test_it_compiles_without_graph_breaks(model, tokens, rows):
    options = inputs(*ROWS[rows])
    expected = run(model, "nsa_blocks", tokens, **options)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    model.zero_grad()
    result = compiled(tokens, use_cache=False, **options).logits
    if "attention_mask" in options:
        result = result[options["attention_mask"].bool()]
    result.square().mean().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert_same((result.detach(), found), expected)


@pytest.mark.slow
@torch.no_grad()
def test_steps_over_a_static_cache_compile_without_graph_breaks(model, tokens):
    model.set_attn_implementation("nsa_blocks")
    expected = model(tokens).logits[:, 100:]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=TOKENS + 20)
    model(tokens[:, :100], past_key_values=cache)
    for i in range(3):
        logits = compiled(tokens[:, 100 + i : 101 + i], past_key_values=cache).logits
        assert difference(logits, expected[:, i : i + 1]) < LOGITS
