"""The runs of the study: rows, arms and evaluations with known results."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import random_select
import run as study
import tomllib
import torch
from tokenizers import Tokenizer, models

from nsa_core import NSAConfig, nsa_attention
from nsa_core.contract import SlotCall
from nsa_models.lm.model import parameter_count

PLAN = tomllib.loads(study.ARMS.read_text()) | {
    "model": {
        "dim": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "compress_block_size": 8,
        "compress_stride": 4,
        "select_block_size": 16,
        "num_selected_blocks": 4,
        "window_size": 8,
    },
    "training": {
        "n_layers": 2,
        "tokens": 1024,
        "row": 128,
        "batch": 2,
        "warmup": 1,
        "points": 2,
        "seeds": [0, 1],
    },
}
VOCAB = 64


@pytest.fixture
def tokens() -> study.Tokens:
    """Three documents of 300, 100 and 520 tokens."""
    documents = [(0, 300), (300, 100), (400, 520)]
    ids = np.random.default_rng(0).integers(VOCAB, size=920).astype("<u2")
    return study.Tokens(ids, documents, "digest")


def test_rows_lie_within_documents_and_are_the_same_for_all_arms(tokens):
    rows = study.TokenRows(tokens, 128, seed=1)
    starts = [0, 128, 400, 528, 656, 784]
    epoch = [rows.row(n) for n in range(6)]
    found = [tokens.ids[start : start + 129].tolist() for start in starts]
    wanted = [(row[:-1], row[1:]) for row in found]
    assert sorted((r.tokens, r.targets) for r in epoch) == sorted(wanted)
    assert [rows.row(n) for n in range(6, 12)] != epoch
    assert [study.TokenRows(tokens, 128, 1).row(n) for n in range(6)] == epoch


def test_the_wide_arm_has_the_parameters_of_nsa():
    plan = tomllib.loads(study.ARMS.read_text())
    with torch.device("meta"):
        counts = {
            arm: parameter_count(study.build(plan, arm, 16384, 0))
            for arm in ("dense", "dense_wide", "nsa")
        }
    assert counts["dense_wide"] == pytest.approx(counts["nsa"], rel=2e-3)
    assert counts["dense"] < 0.9 * counts["nsa"]


def test_arms_change_what_their_names_say():
    plan = tomllib.loads(study.ARMS.read_text())
    layers = {arm: study.model_config(plan, arm, 16384).layer for arm in plan["arms"]}
    changed = {"nsa_shared_kv": {"shared_kv": True}, "nsa_mean": {"compress": "mean"}}
    for arm, layer in layers.items():
        assert layer == dataclasses.replace(layers["nsa"], **changed.get(arm, {})), arm


@pytest.mark.parametrize("arm", ["window", "window_cmp"])
def test_closed_branches_add_nothing(arm):
    """The layer equals one whose gates are 0 for the closed branches."""
    attn = study.build(PLAN, arm, VOCAB, seed=3).blocks[0].attn.double()
    x = torch.randn(1, 96, 32, dtype=torch.float64)
    projected = attn.project(x)
    gates = torch.sigmoid(x @ attn.gate.weight.T + attn.gate.bias).unflatten(-1, (-1, 3))
    for number, branch in enumerate(study.BRANCHES):
        if branch not in PLAN["arms"][arm]["branches"]:
            gates[..., number] = 0
    o = nsa_attention(
        projected.q,
        projected.k,
        projected.v,
        gates,
        config=attn.config,
        k_cmp=projected.k_cmp,
        v_cmp=projected.v_cmp,
    )
    torch.testing.assert_close(attn(x), attn.out(o.flatten(-2)))


def test_arms_of_one_seed_begin_with_the_same_weights():
    nsa, window = (study.build(PLAN, arm, VOCAB, 5).state_dict() for arm in ("nsa", "window"))
    assert nsa.keys() == window.keys()
    assert all(torch.equal(nsa[name], window[name]) for name in nsa)


def test_random_blocks_follow_the_rules_of_selection():
    geometry = NSAConfig(**PLAN["model"]).geometry
    q, k_cmp = torch.zeros(2, 200, 4, 8), torch.zeros(2, 49, 2, 8)
    blocks = random_select.forward(q, k_cmp, torch.zeros(2, 4, 200), call=SlotCall(geometry, 1.0))
    assert blocks.shape == (2, 200, 2, 4)
    assert blocks.dtype == torch.int32
    chosen = set()
    for t in (0, 15, 16, 70, 199):
        current = t // 16
        for row in blocks[:, t].flatten(0, 1).tolist():
            real = [b for b in row if b >= 0]
            assert row == sorted(set(real)) + [-1] * (4 - len(real))
            assert len(real) == min(4, current + 1)
            forced = {0, *range(max(0, current - geometry.local_blocks + 1), current + 1)}
            assert forced <= set(real) <= set(range(current + 1))
            chosen.add(tuple(real))
    assert len(chosen) > 5  # they differ


def test_the_loss_of_an_indifferent_model_is_that_of_chance(tokens):
    model = study.build(PLAN, "dense", VOCAB, 0)
    torch.nn.init.zeros_(model.embed.weight)
    found = study.held_out_loss(model, study.held_out_rows(tokens, 128), 2)
    assert found["documents"] == 2  # one document is too short
    assert found["loss"] == pytest.approx(math.log(VOCAB))
    assert found["standard_error"] == pytest.approx(0, abs=1e-6)
    edges = [(part["first"], part["last"]) for part in found["by_position"]]
    assert edges == [(0, 16), (16, 32), (32, 64), (64, 128)]


def test_the_loss_is_the_mean_over_documents(tokens):
    """Check against cross-entropy, and the standard error against its formula."""
    model = study.build(PLAN, "nsa", VOCAB, 0)
    model.embed.weight.data *= 50  # so that documents have different losses
    found = study.held_out_loss(model, study.held_out_rows(tokens, 128), 2)
    losses = []
    for starts in ([0, 128], [400, 656]):
        rows = torch.tensor([tokens.ids[s : s + 129].tolist() for s in starts])
        loss = model(rows[:, :-1], targets=rows[:, 1:]) / 256
        losses.append(loss.item())
    assert found["document_losses"] == pytest.approx(losses, abs=1e-4)
    assert found["loss"] == pytest.approx(sum(losses) / 2, abs=1e-4)
    assert found["standard_error"] == pytest.approx(abs(losses[0] - losses[1]) / 2, abs=1e-4)
    quarters = [part["loss"] for part in found["by_position"]]
    weights = [16, 16, 32, 64]
    whole = sum(w * q for w, q in zip(weights, quarters)) / 128
    assert whole == pytest.approx(found["loss"], abs=1e-4)


def test_arms_take_the_best_rate_of_a_complete_sweep(tmp_path):
    plan = PLAN | {"sweep": {"rates": [0.001, 0.002], "arms": ["nsa"], "tokens": 9}}
    for rate, loss in ((0.001, 3.0), (0.002, 2.0)):
        document = {"complete": True, "evaluations": [{"loss": 0.0}, {"loss": loss}]}
        (tmp_path / f"sweep-nsa-{rate:g}.json").write_text(json.dumps(document))
    assert study.best_rate(plan, tmp_path, "nsa") == 0.002
    (tmp_path / "sweep-nsa-0.001.json").unlink()
    with pytest.raises(SystemExit, match=r"sweep-nsa-0.001.json has no complete run"):
        study.best_rate(plan, tmp_path, "nsa")


def test_a_run_that_was_cut_resumes_to_the_same_result(tokens, tmp_path, monkeypatch):
    """A run that an error ended after step 3 goes on, to the result of a run in one piece."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for side in ("train", "held_out"):
        tokens.ids.tofile(tmp_path / f"{side}.bin")
        listed = [{"first": first, "tokens": count} for first, count in tokens.documents]
        (tmp_path / f"{side}.json").write_text(json.dumps(listed))
    monkeypatch.setattr(study, "questions", lambda corpus, length: [])
    run = study.Run("nsa", 0, 0.01, PLAN["training"]["tokens"], "arm")
    results, whole_train = {}, study.train
    for name in ("whole", "cut"):
        out = tmp_path / name
        out.mkdir()
        if name == "cut":

            def cut(trainer, saves, write):
                def report(progress):
                    if progress.step == 3:
                        raise RuntimeError("cut")
                    write(progress)

                whole_train(trainer, saves, report)

            monkeypatch.setattr(study, "train", cut)
            with pytest.raises(RuntimeError):
                study.train_and_evaluate(PLAN, run, tmp_path, out, "cpu")
            first = json.loads((out / "nsa-seed0.json").read_text())
            assert (first["complete"], first["ended"]) == (False, "RuntimeError: cut")
            assert [e["step"] for e in first["evaluations"]] == [0, 2]

            def go_on(trainer, saves, write):
                assert trainer.step_number == 3
                whole_train(trainer, saves, write)

            monkeypatch.setattr(study, "train", go_on)
        study.train_and_evaluate(PLAN, run, tmp_path, out, "cpu")
        results[name] = json.loads((out / "nsa-seed0.json").read_text())
    whole, resumed = results["whole"], results["cut"]
    assert (whole["complete"], whole["tokens"], whole["learning_rate"]) == (True, 1024, 0.01)
    assert [e["step"] for e in whole["evaluations"]] == [0, 2, 4]
    assert [len(e.get("document_losses", ())) for e in whole["evaluations"]] == [0, 0, 2]
    assert whole["corpus"]["unique_tokens"] == 6 * 128
    assert [set(layer) for layer in whole["mass"]] == [
        {"layer", "selected", "keys", "random", "best"}
    ] * 2
    assert resumed["complete"]
    assert resumed["evaluations"] == whole["evaluations"]
    assert resumed["mass"] == whole["mass"]
