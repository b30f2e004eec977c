"""NSA models of transformers: every way to call a model gives the numbers of documents alone."""

from __future__ import annotations

import copy
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DynamicCache, Trainer, TrainingArguments

from hf_models import NSA, NSA_MODELS, nsa_model, padded_batch, trained
from nsa_core import InvalidInput

ROW = 60


def _lora(model: Any) -> Any:
    return get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["qkv", "out"], r=2))


def _checkpointed(model: Any) -> Any:
    model = copy.deepcopy(model).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def _replica(module: Any) -> Any:
    """Return what nn.DataParallel makes of a module on each GPU."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        replica._modules[name] = _replica(child)
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.detach().clone())
    return replica


def _logits(model: Any, **extra: Any) -> Any:
    return lambda **arguments: model(**arguments, **extra)[0]


def _through_head(model: Any, decoder: Any, output: int | str = 0, **extra: Any) -> Any:
    def call(**arguments: Any) -> torch.Tensor:
        hidden = decoder(**arguments, **extra)[output]
        return model.lm_head(hidden[-1] if isinstance(hidden, tuple) else hidden)

    return call


def _embedded(model: Any, call: Any) -> Any:
    return lambda input_ids, **others: call(
        inputs_embeds=model.model.embed_tokens(input_ids), **others
    )


DOORS: dict[str, Any] = {
    "model": _logits,
    "a tuple": lambda m: _logits(m, return_dict=False),
    "embeddings": lambda m: _embedded(m, _logits(m)),
    "hidden states": lambda m: _through_head(m, m, "hidden_states", output_hidden_states=True),
    "decoder": lambda m: _through_head(m, m.model),
    "embeddings of the decoder": lambda m: _embedded(m, _through_head(m, m.model)),
    "get_decoder": lambda m: _through_head(m, m.get_decoder(), return_dict=False),
    "base_model": lambda m: _through_head(m, m.base_model, "last_hidden_state", use_cache=False),
    "LoRA": lambda m: _logits(_lora(m)),
    "decoder under LoRA": lambda m: _through_head(m, _lora(m).get_base_model().get_decoder()),
    "LoRA on the decoder": lambda m: _through_head(m, _lora(m.model)),
    "checkpointing": lambda m: _logits(_checkpointed(m)),
    "checkpointing of the decoder": lambda m: _through_head(m, _checkpointed(m).model),
    "replica": lambda m: _logits(_replica(m)),
    "compiled": lambda m: _logits(torch.compile(m, backend="eager")),
}


def _positions(rows: Any) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


class Batch(NamedTuple):
    """A call of a model, and the logits of its documents alone.

    Attributes:
        arguments: The arguments, tensors with the columns of all rows.
        is_token: bool [B, S].
        documents: The tokens of the documents in each row.
        expected: The logits of all tokens.
    """

    arguments: dict[str, torch.Tensor]
    is_token: torch.Tensor
    documents: list[list[torch.Tensor]]
    expected: torch.Tensor


DOCUMENTS = {1: [(20, 1, 24)], 2: [(20, 25), (9, 24)]}  # their lengths by the number of rows
PADDING = {  # (side, columns with padding in each row)
    "none": ((), ()),
    "left": (range(7), range(19)),
    "right": (range(45, 52), range(33, 52)),
    "both": (range(3), (*range(12), *range(45, 52))),
    "within a document": ((25, 26, 27), (0, *range(12, 30))),
}
PACKING = ("", "at 0", "positions", "shifted", "broadcast", "boundaries", "both")


def _batch(model: Any, rows: int, padding: str, packing: str) -> Batch | None:
    """Return a batch; None if it does not exist."""
    lengths = DOCUMENTS[rows]
    if not packing or packing == "at 0":
        lengths = [(sum(row),) for row in lengths]
    if padding == "none":
        lengths = [(45 - sum(row[1:]), *row[1:]) for row in lengths]
    if packing == "broadcast":
        lengths = lengths[:1] * rows
        if padding != "none":
            return None
    columns = 45 if padding == "none" else 52
    ids = torch.zeros(rows, columns, dtype=torch.long)
    is_token, positions = torch.ones_like(ids, dtype=torch.bool), torch.full_like(ids, 1)
    bounds, documents = [0], []
    for row, padded in zip(range(rows), PADDING[padding]):
        is_token[row, list(padded)] = False
        # the row of the fewest tokens decides; other rows fill their last document
        total = int(is_token[row].sum())
        sizes = [*lengths[row][:-1], total - sum(lengths[row][:-1])]
        tokens = torch.randint(1, 61, (total,))
        starts = [0 if packing != "shifted" else 3 + 100 * i for i in range(len(sizes))]
        ids[row, is_token[row]] = tokens
        positions[row, is_token[row]] = torch.cat(
            [torch.arange(start, start + n) for start, n in zip(starts, sizes)]
        )
        documents.append(list(tokens.split(sizes)))
        column = is_token[row].nonzero().flatten()
        for n in torch.tensor(sizes[:-1]).cumsum(0).tolist():
            bounds.append(row * columns + int(column[n]))
        bounds.append((row + 1) * columns)
    arguments = {"input_ids": ids}
    if padding != "none":
        arguments["attention_mask"] = is_token.long()
    if packing in ("at 0", "positions", "shifted", "both"):
        arguments["position_ids"] = positions
    if packing == "broadcast":
        arguments["position_ids"] = positions[:1]
    if packing in ("boundaries", "both"):
        arguments["cu_seq_lens_q"] = torch.tensor(bounds, dtype=torch.int32)
    alone = [model(document[None]).logits[0] for row in documents for document in row]
    return Batch(arguments, is_token, documents, torch.cat(alone))


@pytest.fixture(scope="module")
def documents_alone() -> tuple[Any, dict[tuple[int, str, str], Batch]]:
    """Return a model, and batches by (number of rows, padding, kind of packing)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = nsa_model("qwen3", torch.float64)
        names = itertools.product(DOCUMENTS, PADDING, PACKING)
        batches = {name: _batch(model, *name) for name in names}
        return model, {name: batch for name, batch in batches.items() if batch is not None}


def _wrong(actual: torch.Tensor, batch: Batch) -> bool:
    return not torch.allclose(actual[batch.is_token], batch.expected, rtol=0, atol=1e-11)


_DIAGONAL = [(2, *pair) for pair in zip(PADDING, PACKING)] + [(2, "none", "both")]
FAST_DOORS = ("model", "decoder", "LoRA", "checkpointing", "replica")


@pytest.mark.parametrize(
    "door", [pytest.param(d, marks=[pytest.mark.slow] * (d not in FAST_DOORS)) for d in DOORS]
)
def test_every_door_gives_the_numbers_of_each_document_alone(door, documents_alone):
    model, batches = documents_alone
    call = DOORS[door](model)
    wrong = [
        name
        for name, batch in batches.items()
        # nn.DataParallel would divide the boundaries, and a replica refuses them
        if not (door == "replica" and "cu_seq_lens_q" in batch.arguments)
        # a compiled model is slow to start: each padding and each packing once
        and not (door == "compiled" and name not in _DIAGONAL)
        and _wrong(call(**batch.arguments), batch)
    ]
    assert not wrong


WITH_CACHE = ("model", "a tuple", "embeddings", "decoder", "get_decoder")


@torch.no_grad()
@pytest.mark.parametrize("split", [0, 5, 20, 29])
@pytest.mark.parametrize(
    "door", [pytest.param(d, marks=[pytest.mark.slow] * (d != "model")) for d in WITH_CACHE]
)
def test_every_door_gives_the_same_numbers_with_a_cache(door, split, documents_alone):
    """In one call, and in two whose division is in padding, in a document or at its start."""
    model, batches = documents_alone
    call, wrong = DOORS[door](model), []
    for name, batch in batches.items():
        if len(batch.documents[0]) > 1:
            continue  # packed: refused
        cache, logits = model.new_cache(), []
        for start, end in ((0, split), (split, batch.is_token.shape[1])):
            arguments = {key: x[:, start:end] for key, x in batch.arguments.items()}
            if "attention_mask" in arguments:
                arguments["attention_mask"] = batch.arguments["attention_mask"][:, :end]
            if end:
                logits.append(call(**arguments, past_key_values=cache))
        if _wrong(torch.cat(logits, 1), batch):
            wrong.append(name)
    assert not wrong


@torch.no_grad()
def test_packed_documents_beside_a_cache_are_refused(documents_alone):
    model, batches = documents_alone
    for packing in PACKING[2:]:
        batch = batches[2, "none", packing]
        message = "a cache: packed documents and a cache are not supported: pass use_cache=False"
        with pytest.raises(InvalidInput, match=message):
            model(**batch.arguments, past_key_values=model.new_cache())
        with pytest.raises(InvalidInput, match=message):
            model.generate(**batch.arguments, max_new_tokens=3)


@pytest.mark.parametrize("kind", NSA_MODELS)
def test_a_loss_that_calls_the_decoder_has_the_gradients_of_the_documents(kind):
    model = nsa_model(kind, torch.float64)
    lengths = ((20, 40), (15, 1, 44))
    ids = torch.randint(1, 61, (2, ROW))
    documents = [d for row, sizes in zip(ids, lengths) for d in row.split(list(sizes))]
    for document in documents:
        logits = model(document[None]).logits[0, :-1]
        nn.functional.cross_entropy(logits, document[1:], reduction="sum").backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    hidden = model.get_decoder()(ids, position_ids=_positions(lengths)).last_hidden_state
    labels = torch.cat([nn.functional.pad(d[1:], (0, 1), value=-100) for d in documents])
    logits = (hidden @ model.lm_head.weight.T).flatten(0, 1)
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    for (name, parameter), grad in zip(model.named_parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-9, atol=1e-11), name


@torch.no_grad()
@pytest.mark.parametrize("door", ["model", "decoder"])
def test_positions_that_continue_a_cache_are_accepted(door):
    model = nsa_model("qwen2", torch.float64)
    ids, mask, _ = padded_batch((50, 30))
    more = torch.randint(1, 61, (2, 8))
    both = torch.cat([mask, torch.ones_like(more)], 1)
    positions = both.cumsum(-1) - 1
    expected = model(torch.cat([ids, more], 1), attention_mask=both).logits[:, 50:]
    call, first = DOORS[door](model), {"attention_mask": mask, "position_ids": positions[:, :50]}
    for last in ({"attention_mask": both}, {}):  # tokens without padding need no mask
        cache = model.new_cache()
        call(input_ids=ids, past_key_values=cache, **first)
        logits = call(input_ids=more, past_key_values=cache, position_ids=positions[:, 50:], **last)
        assert torch.allclose(logits, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_decoder_returns_a_cache_as_the_model_does():
    model, ids = nsa_model(dtype=torch.float64), torch.randint(1, 61, (2, 60))
    expected = model.model(ids).last_hidden_state
    assert model.model(ids, return_dict=False, use_cache=False)[0].equal(expected)
    first = model.model(ids[:, :50], use_cache=True)
    cache = first["cache" if "cache" in first else "past_key_values"]
    second = model.model(ids[:, 50:], past_key_values=cache)
    hidden = torch.cat([first.last_hidden_state, second.last_hidden_state], 1)
    assert torch.allclose(hidden, expected, rtol=0, atol=1e-12)


def test_generate_passes_no_positions():
    """A check of positions would wait for the GPU in each step."""
    model = nsa_model()
    ids, mask, _ = padded_batch((40, 25))
    passed = []
    model.register_forward_pre_hook(
        lambda module, args, options: passed.append(options.get("position_ids")), with_kwargs=True
    )
    model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=2)
    assert passed == [None] * 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "boundaries of row 0": (
        {"cu_seq_lens_q": torch.tensor([0, 20, 60], dtype=torch.int32), "max_length_q": 40},
        r"boundaries of the 2 rows laid end to end, ascending from 0 to 2 .*, got \[0, 20, 60\]",
    ),
    "boundaries of rows side by side": (
        {"cu_seq_lens_q": torch.tensor([[0, 20, 60], [0, 30, 60]])},
        r"cu_seq_lens_q must be a tensor \[documents \+ 1\], got \[2, 3\]",
    ),
    "boundaries in a list": (
        {"cu_seq_lens_q": [0, 60, 120]},
        r"cu_seq_lens_q must be a tensor \[documents \+ 1\], got list",
    ),
    "boundaries of the keys alone": (
        {"cu_seq_lens_k": torch.tensor([0, 20, 60, 120])},
        "cu_seq_lens_k is passed without cu_seq_lens_q",
    ),
    "a document in two rows": (
        {"cu_seq_lens_q": torch.tensor([0, 20, 120])},
        r"with every multiple of 60, got \[0, 20, 120\]",
    ),
    "boundaries that descend": (
        {"cu_seq_lens_q": torch.tensor([0, 70, 60, 120])},
        r"ascending from 0 to .*, got \[0, 70, 60, 120\]",
    ),
    "boundaries before the rows": (
        {"cu_seq_lens_q": torch.tensor([-5, 0, 60, 120])},
        r"ascending from 0 to .*, got \[-5, 0, 60, 120\]",
    ),
    "fractions of boundaries": (
        {"cu_seq_lens_q": torch.tensor([0.0, 60.0, 120.0])},
        r"cu_seq_lens_q must be integers, got torch\.float32",
    ),
    "boundaries and other positions": (
        {
            "cu_seq_lens_q": torch.tensor([0, 20, 60, 120]),
            "position_ids": _positions(((30, 30), (60,))),
        },
        "position_ids must count up by 1 in each document of cu_seq_lens_q",
    ),
    "fractions of positions": (
        {"position_ids": torch.arange(0, 30, 0.5)[None]},
        r"position_ids must be integers, got torch\.float32",
    ),
    "positions that count padding": (
        {
            "position_ids": torch.arange(60)[None],
            "attention_mask": torch.ones(2, 60).index_fill_(1, torch.tensor([30, 31]), 0),
        },
        r"of sequence 0 count the padding between its tokens, .* attention_mask\.cumsum\(-1\) - 1",
    ),
    "positions of one row": ({"position_ids": torch.arange(60)}, r"or \[1, 60\].* got \[60\]"),
    "too few positions": ({"position_ids": torch.arange(59)[None]}, r"\[2, 60\] .* got \[1, 59\]"),
    "positions of three rows": (
        {"position_ids": torch.arange(60).expand(3, -1)},
        r"position_ids must be \[2, 60\] or \[1, 60\], like the input, got \[3, 60\]",
    ),
    "a mask of one row": ({"attention_mask": torch.ones(1, 60)}, r"\[2, 60\], .* got \[1, 60\]"),
    "a mask with 4 axes": (
        {"attention_mask": torch.ones(2, 1, 60, 60)},
        r"must be a 2-D mask \[2, 60\], .* got \[2, 1, 60, 60\]",
    ),
    "numbers of documents": (
        {"attention_mask": torch.arange(120).view(2, 60) // 30},
        r"attention_mask must be 1 at tokens and 0 at padding, got \[2, 3\]: .* position_ids",
    ),
    "negative integers in a mask": ({"attention_mask": torch.full((2, 60), -1)}, r"got \[-1\]: "),
    "fractions in a mask": ({"attention_mask": torch.full((2, 60), 0.5)}, r"got \[0\.5\]: "),
    "an additive mask": (
        {"attention_mask": torch.zeros(2, 60).index_fill_(1, torch.arange(9), -torch.inf)},
        r"got \[-inf\]: pass mask == 0 for an additive mask",
    ),
    "an additive mask without padding": (
        {"attention_mask": torch.zeros(2, 60, dtype=torch.bfloat16)},
        r"got \[0\.0\]: pass mask == 0 for an additive mask",
    ),
    "masks by kind of layer": (
        {"attention_mask": {"full_attention": None}},
        r"must be a 2-D mask \[2, 60\], .* got dict",
    ),
    "attention weights": ({"output_attentions": True}, "output_attentions is not supported"),
    "attention to later tokens": ({"is_causal": False}, "is_causal must be True, got False"),
    "two caches": (
        {"past_key_values": DynamicCache(), "cache": DynamicCache()},
        "past_key_values and cache are passed",
    ),
    "another cache": (
        {"past_key_values": DynamicCache()},
        "must be a cache of an NSA model, got DynamicCache",
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_nsa_cannot_serve_are_refused(case, documents_alone):
    (arguments, message), (model, _) = REFUSED[case], documents_alone
    for call in (model, model.model):
        with pytest.raises(InvalidInput, match=message):
            call(torch.ones(2, 60, dtype=torch.long), **arguments)


@torch.no_grad()
@pytest.mark.parametrize("nsa_layers", [None, [1]])
def test_an_input_without_its_axes_is_refused(nsa_layers):
    model, ids = nsa_model(nsa_layers=nsa_layers), torch.ones(20, dtype=torch.long)
    with pytest.raises(InvalidInput, match=r"input_ids must be \[B, S\], got \[20\]: pass input_"):
        model(ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(InvalidInput, match=r"inputs_embeds must be \[B, S, dim\], got \[20, 32\]"):
        model.model(inputs_embeds=torch.randn(20, 32))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.int64, torch.bfloat16])
def test_a_mask_may_have_any_dtype(dtype, documents_alone):
    model, _ = documents_alone
    ids = torch.ones(2, 60, dtype=torch.long)
    mask = torch.ones(2, 60).index_fill_(1, torch.arange(9), 0)
    expected = model(ids, attention_mask=mask.bool()).logits
    assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    "packing",
    [
        {"position_ids": torch.arange(60)[None] % 30},
        {"cu_seq_lens_q": torch.tensor([0, 20, 60, 120])},
    ],
)
def test_packed_rows_do_not_depend_on_the_default_device(packing, documents_alone):
    model, _ = documents_alone
    ids = torch.randint(1, 61, (2, 60))
    expected = model(ids, use_cache=False, **packing).logits
    with torch.device("meta"):
        assert torch.equal(model(ids, use_cache=False, **packing).logits, expected)


@torch.no_grad()
def test_a_batch_without_rows_may_have_a_mask(documents_alone):
    model, _ = documents_alone
    nothing = torch.ones(0, 60, dtype=torch.long)
    assert model(nothing, attention_mask=nothing).logits.shape[:2] == (0, 60)


@torch.no_grad()
def test_positions_that_do_not_continue_the_cache_are_refused():
    model = nsa_model()
    ids, mask, _ = padded_batch((50, 30))
    for earlier in (None, mask.cumsum(-1) - 1):
        cache = model.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=earlier)
        for call in (model, model.model):
            for start in (0, 40, 100):
                message = (
                    f"sequence 0 begin at {start}, but beside a cache of 50 tokens they must begin"
                )
                later = torch.arange(start, start + 8)[None]
                with pytest.raises(InvalidInput, match=message):
                    call(ids[:, :8], past_key_values=cache, position_ids=later)
            with pytest.raises(InvalidInput, match="cu_seq_lens_q is passed with a cache: "):
                call(ids[:, :8], past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 8, 16]))
        assert cache.get_seq_length() == 50
        columns = torch.arange(50, 58)[None]  # positions that count the padding
        model(ids[:, :8], past_key_values=cache, position_ids=columns)
    with pytest.raises(
        InvalidInput, match="0 begin at 7, but beside a cache of 0 tokens they must begin at 0"
    ):
        model(ids, past_key_values=model.new_cache(), position_ids=7 + torch.arange(50)[None])


@torch.no_grad()
@pytest.mark.parametrize("nsa_layers", [None, [1]])
def test_a_mask_that_contradicts_the_cache_is_refused(nsa_layers):
    """The cache holds no padding, and so cannot hide or show a token later."""
    model = nsa_model(nsa_layers=nsa_layers)
    ids, mask, _ = padded_batch((50, 30))
    whole = torch.cat([mask, torch.ones(2, 1)], 1)
    for earlier, later, message in (
        (None, whole, r"attention_mask\[1, 0\] is 0, but was 1 in the call that filled past_key_"),
        (mask, torch.ones(2, 51), r"attention_mask\[1, 0\] is 1, but was 0 in the call that"),
    ):
        for dtype in (torch.float32, torch.bool, torch.int64):
            cache = model.new_cache()
            model(ids, attention_mask=earlier, past_key_values=cache)
            with pytest.raises(InvalidInput, match=message):
                model(ids[:, :1], attention_mask=later.to(dtype), past_key_values=cache)
            assert cache.get_seq_length() == 50
        for mask_of_one in (later[:1], None):
            with pytest.raises(InvalidInput, match="has 1 sequences, but past_key_values has 2: "):
                model(ids[:1, :1], attention_mask=mask_of_one, past_key_values=cache)
    model(ids[:, :1], attention_mask=whole, past_key_values=cache)


@torch.no_grad()
@pytest.mark.parametrize("compress", ["mlp", "mean"])
def test_documents_start_anywhere_unless_phi_compresses_rotated_keys(compress):
    """The mean of rotated keys rotates with them; results of other kinds of phi do not."""
    nsa = {**NSA, "rope_before_compress": True, "compress": compress}
    model, ids = nsa_model(dtype=torch.float64, nsa=nsa), torch.randint(1, 61, (1, 60))
    calls = [
        {"position_ids": torch.arange(5, 65)[None]},
        {"position_ids": torch.cat([torch.arange(30), torch.arange(70, 100)])[None]},
        {"position_ids": torch.arange(5, 65)[None], "cu_seq_lens_q": torch.tensor([0, 60])},
    ]
    for arguments in calls:
        if compress == "mlp":
            with pytest.raises(InvalidInput, match="must start it at 0, because phi compresses"):
                model(ids, **arguments)
            continue
        parts = ids.split([30, 30] if arguments is calls[1] else [60], 1)
        expected = torch.cat([model(part).logits for part in parts], 1)
        assert torch.allclose(model(ids, **arguments).logits, expected, rtol=0, atol=1e-12)


def test_checkpointing_does_not_drop_a_cache_in_silence():
    model, ids = _checkpointed(nsa_model()), torch.randint(1, 61, (1, 30))
    cache = model.new_cache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(InvalidInput, match="in training with activation checkpointing"):
        model.model(ids, past_key_values=cache)
    assert not {"cache", "past_key_values"} & model(ids, use_cache=True).keys()


def test_boundaries_that_data_parallel_divided_are_refused():
    replica = _replica(nsa_model())
    with pytest.raises(InvalidInput, match=r"cu_seq_lens_q is divided by nn\.DataParallel"):
        replica(torch.ones(1, 60, dtype=torch.long), cu_seq_lens_q=torch.tensor([0, 20, 60]))


def _smoothed(logits: torch.Tensor, labels: torch.Tensor, factor: float) -> tuple[float, int]:
    """Return the sum of the losses of the next tokens, and their number."""
    logits, labels = logits[:, :-1].double(), labels[:, 1:]
    log_p = logits.log_softmax(-1)[labels != -100]
    target = torch.full_like(log_p, factor / log_p.shape[-1])
    labels = labels[labels != -100]
    target[torch.arange(len(labels)), labels] += 1 - factor
    return -(target * log_p).sum().item(), len(labels)


def _sharded(model: Any) -> Any:
    """Give a model the class that ``fully_shard`` gives it."""
    model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})
    return model


@pytest.mark.parametrize(
    ("kind", "wrap", "factor"),
    [
        ("llama", lambda model: model, 0.0),
        ("llama", lambda model: model, 0.1),
        ("qwen2", _lora, 0.1),
        ("qwen3", _sharded, 0.1),
    ],
    ids=["no smoothing", "smoothing", "LoRA", "FSDP2"],
)
def test_the_trainer_compares_with_the_next_token(kind, wrap, factor, tmp_path):
    """With label smoothing and without, over two batches of unlike numbers of tokens."""
    model = nsa_model(kind)
    rows = torch.randint(1, 61, (2, 40))
    labels = rows.clone()
    labels[0, :30] = -100
    with torch.no_grad():
        parts = [
            _smoothed(model(row[None]).logits, label[None], factor)
            for row, label in zip(rows, labels)
        ]
    data = [{"input_ids": r.tolist(), "labels": y.tolist()} for r, y in zip(rows, labels)]
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    options |= {"label_smoothing_factor": factor, "learning_rate": 0.0}
    trainer, (loss,) = trained(wrap(model), data, tmp_path, **options)
    assert loss == pytest.approx(sum(s for s, _ in parts) / sum(n for _, n in parts), rel=1e-5)
    evaluated = trainer.evaluate(data[1:])["eval_loss"]
    assert evaluated == pytest.approx(parts[1][0] / parts[1][1], rel=1e-5)


def test_the_trainer_keeps_packed_and_padded_documents_apart(tmp_path, documents_alone):
    model, batches = documents_alone
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = Trainer(model=model, args=arguments)
    for name in itertools.product(DOCUMENTS, PADDING, ("shifted", "boundaries")):
        batch = batches[name]
        targets = [torch.cat([d[1:], d.new_tensor([-100])]) for row in batch.documents for d in row]
        expected = nn.functional.cross_entropy(batch.expected, torch.cat(targets))
        shifted = torch.full_like(batch.arguments["input_ids"], -100)
        shifted[batch.is_token] = torch.cat(targets)
        with torch.no_grad():
            loss = trainer.compute_loss(model, {**batch.arguments, "shift_labels": shifted})
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6), name
