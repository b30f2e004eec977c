"""The runs of the study: rows, arms and evaluations with known results."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import random_select
import run as study
import starts
import torch
from tokenizers import Tokenizer, models

from nsa_core import NSAConfig, nsa_attention
from nsa_core.contract import SlotCall
from nsa_models.hf import convert_checkpoint
from nsa_models.lm.model import parameter_count
from nsa_models.lm.model_folder import open_folder

LAYER = {
    "dim": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 16,
    "num_selected_blocks": 4,
    "window_size": 8,
}
SMALL = {
    **study.PLAN["small"],
    "layer": LAYER,
    "n_layers": 2,
    "row": 128,
    "batch": 2,
    "warmup": 1,
    "points": 2,
}
VOCAB = 64
END = VOCAB - 1


def a_run(arm, seed=0, group="small"):
    return study.Run(group, arm, seed, 0.01, 1024, "arm")


@pytest.fixture
def documents():
    """Three documents of 300, 100 and 520 tokens."""
    ids = np.random.default_rng(0).integers(END, size=920).astype("<u2")
    ids[[299, 399, 919]] = END
    return np.split(ids, [300, 400])


@pytest.fixture
def corpus(tmp_path, documents, monkeypatch):
    """A folder with these documents on both sides; the small arms are tiny."""
    monkeypatch.setitem(study.PLAN, "small", SMALL)
    words = {**{str(i): i for i in range(END)}, "<|endoftext|>": END}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(tmp_path / "tokenizer.json"))
    for side in ("train", "held_out"):
        np.concatenate(documents).tofile(tmp_path / f"{side}.bin")
    study.read_documents.cache_clear()
    return tmp_path


@pytest.fixture
def real_sizes(monkeypatch):
    """The sizes of the plan need the vocabulary alone."""
    vocabulary = SimpleNamespace(get_vocab_size=lambda: 16384)
    monkeypatch.setattr(study, "open_tokenizer", lambda corpus: vocabulary)


def test_rows_lie_within_documents_and_are_the_same_for_all_arms(corpus, documents):
    read = study.read_documents(corpus, "train")
    assert [document.tolist() for document in read] == [d.tolist() for d in documents]
    rows = study.TokenRows(read, 128, seed=1)
    ids, starts = np.concatenate(documents), [0, 128, 400, 528, 656, 784]
    epoch = [rows.row(n) for n in range(6)]
    found = [ids[start : start + 129].tolist() for start in starts]
    wanted = [(row[:-1], row[1:]) for row in found]
    assert sorted((r.tokens, r.targets) for r in epoch) == sorted(wanted)
    assert [rows.row(n) for n in range(6, 12)] != epoch
    assert [study.TokenRows(read, 128, 1).row(n) for n in range(6)] == epoch


def test_the_names_of_runs_differ_and_their_order_is_by_seed():
    names = [run.name for group in study.PLAN for run in study.all_runs(group)]
    assert len(set(names)) == len(names)
    small = [run for run in study.all_runs("small") if run.purpose == "arm"]
    assert [run.seed for run in small] == sorted(run.seed for run in small)
    assert study.all_runs("small")[0].name == "sweep-dense-0.0005"


@pytest.mark.parametrize(
    ("group", "wide", "nsa"),
    [("small", "dense_wide", "nsa"), ("large", "large_dense", "large_nsa")],
)
def test_the_wide_arm_has_the_parameters_of_nsa(group, wide, nsa, real_sizes):
    with torch.device("meta"):
        counts = [
            parameter_count(study.LanguageModel(study.model_config(a_run(arm, 0, group), None)))
            for arm in (wide, nsa)
        ]
    plan = study.PLAN[group]
    rounded = 8 * 3 * plan["layer"]["dim"] * plan["n_layers"]  # hidden units to a multiple of 16
    assert abs(counts[0] - counts[1]) <= rounded


def test_arms_change_what_their_names_say(real_sizes):
    arms = study.PLAN["small"]["arms"]
    layers = {arm: study.model_config(a_run(arm), None).layer for arm in arms}
    changed = {"nsa_shared_kv": {"shared_kv": True}, "nsa_mean": {"compress": "mean"}}
    for arm, layer in layers.items():
        assert layer == dataclasses.replace(layers["nsa"], **changed.get(arm, {})), arm


@pytest.mark.parametrize("arm", ["window", "window_cmp"])
def test_closed_branches_add_nothing(arm, corpus):
    """The layer equals one whose gates are 0 for the closed branches."""
    attn = study.build(a_run(arm, 3), corpus).blocks[0].attn.double()
    x = torch.randn(1, 96, 32, dtype=torch.float64)
    projected = attn.project(x)
    gates = torch.sigmoid(x @ attn.gate.weight.T + attn.gate.bias).unflatten(-1, (-1, 3))
    for number, branch in enumerate(study.BRANCHES):
        if branch not in SMALL["arms"][arm]["branches"]:
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


def test_arms_of_one_seed_begin_with_the_same_weights(corpus):
    nsa, window = (study.build(a_run(arm, 5), corpus).state_dict() for arm in ("nsa", "window"))
    assert nsa.keys() == window.keys()
    assert all(torch.equal(nsa[name], window[name]) for name in nsa)


def test_random_blocks_follow_the_rules_of_selection():
    geometry = NSAConfig(**LAYER).geometry
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


def test_the_loss_of_an_indifferent_model_is_that_of_chance(corpus, documents):
    model = study.build(a_run("dense"), corpus)
    torch.nn.init.zeros_(model.embed.weight)
    found = study.held_out_loss(model, study.held_out_rows(documents, 128), 2)
    assert found["documents"] == 2  # one document is too short
    assert found["loss"] == pytest.approx(math.log(VOCAB))
    assert found["standard_error"] == pytest.approx(0, abs=1e-6)
    edges = [(part["first"], part["last"]) for part in found["by_position"]]
    assert edges == [(0, 16), (16, 32), (32, 64), (64, 128)]


def test_the_loss_is_the_mean_over_documents(corpus, documents):
    """Check against cross-entropy, and the standard error against its formula."""
    model = study.build(a_run("nsa"), corpus)
    model.embed.weight.data *= 50  # so that documents have different losses
    found = study.held_out_loss(model, study.held_out_rows(documents, 128), 2)
    ids, losses = np.concatenate(documents), []
    for firsts in ([0, 128], [400, 656]):
        rows = torch.tensor([ids[s : s + 129].tolist() for s in firsts])
        loss = model(rows[:, :-1], targets=rows[:, 1:]) / 256
        losses.append(loss.item())
    assert found["document_losses"] == pytest.approx(losses, abs=1e-4)
    assert found["loss"] == pytest.approx(sum(losses) / 2, abs=1e-4)
    assert found["standard_error"] == pytest.approx(abs(losses[0] - losses[1]) / 2, abs=1e-4)
    quarters = [part["loss"] for part in found["by_position"]]
    weights = [16, 16, 32, 64]
    whole = sum(w * q for w, q in zip(weights, quarters)) / 128
    assert whole == pytest.approx(found["loss"], abs=1e-4)


@pytest.fixture
def no_questions(monkeypatch):
    monkeypatch.setattr(study, "questions", lambda corpus, lengths, count: [])


def test_a_run_that_was_cut_resumes_to_the_same_result(corpus, monkeypatch, no_questions):
    """A run that an error ended after step 3 goes on, to the result of a run in one piece."""
    whole_train = study.train

    def cut(trainer, saves, write):
        def report(progress):
            if progress.step == 3:
                raise RuntimeError("cut")
            write(progress)

        whole_train(trainer, saves, report)

    def result(name):
        study.Study(a_run("nsa"), corpus, corpus / name, "cpu").go(math.inf)
        return json.loads((corpus / name / "nsa-seed0.json").read_text())

    whole = result("whole")
    monkeypatch.setattr(study, "train", cut)
    with pytest.raises(RuntimeError):
        result("cut")
    first = json.loads((corpus / "cut" / "nsa-seed0.json").read_text())
    assert (first["complete"], first["ended"]) == (False, "RuntimeError: cut")
    assert [e["step"] for e in first["evaluations"]] == [0, 2]
    # A later evaluation, after which nothing was saved, does not count.
    first["evaluations"].append({"step": 4, "tokens": 1024, "loss": 0.0})
    (corpus / "cut" / "nsa-seed0.json").write_text(json.dumps(first))
    monkeypatch.setattr(study, "train", whole_train)
    assert study.Study(a_run("nsa"), corpus, corpus / "cut", "cpu").trainer.step_number == 3
    resumed = result("cut")
    assert (whole["complete"], whole["tokens"], whole["learning_rate"]) == (True, 1024, 0.01)
    assert [e["step"] for e in whole["evaluations"]] == [0, 2, 4]
    assert [len(e.get("document_losses", ())) for e in whole["evaluations"]] == [0, 0, 2]
    assert whole["corpus"]["unique_tokens"] == 6 * 128
    fields = {"layer", "selected", "keys", "random", "best", "window", "gates"}
    assert [set(layer) for layer in whole["mass"]] == [fields] * 2
    at_end = sum(layer["selected"] for layer in whole["mass"]) / 2
    assert whole["evaluations"][-1]["selected"] == pytest.approx(at_end)
    assert resumed["complete"]
    assert resumed["evaluations"] == whole["evaluations"]
    assert resumed["mass"] == whole["mass"]
    cmp = sum((t - 7) // 4 + 1 for t in range(7, 128))
    sel = sum(min(t + 1, 48 + t % 16 + 1) for t in range(128))
    win = sum(min(t + 1, 8) for t in range(128))
    assert whole["keys_per_query"] == (cmp + sel + win) / 128


def test_an_arm_is_evaluated_at_the_tokens_of_its_plan(corpus, monkeypatch, no_questions):
    """Tokens beyond the end, and a second report of one step, add nothing."""
    train = study.train

    def reporting_twice(trainer, saves, report):
        train(trainer, saves, lambda progress: [report(progress) for _ in range(2)])

    monkeypatch.setattr(study, "train", reporting_twice)
    monkeypatch.setitem(SMALL, "points", [256, 700, 1024, 5000])
    run = study.Study(a_run("nsa"), corpus, corpus, "cpu")
    run.go(math.inf)
    assert [e["tokens"] for e in run.facts["evaluations"]] == [0, 256, 768, 1024]
    assert [e["step"] for e in run.facts["evaluations"]] == [0, 1, 3, 4]


def test_the_gates_of_each_branch_are_measured_by_layer(corpus, documents):
    model = study.build(a_run("nsa"), corpus)
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.attn.gate.weight.zero_()
            gates = torch.tensor([0.1, 0.5 + 0.2 * number, 0.9])
            block.attn.gate.bias.view(-1, 3).copy_(gates.logit())
    found = study.mass(model, study.held_out_rows(documents, 128))
    assert [layer["gates"]["sel"] for layer in found] == pytest.approx([0.5, 0.7])
    assert found[1]["gates"] == pytest.approx({"cmp": 0.1, "sel": 0.7, "win": 0.9})
    assert not any(block.attn.gate._forward_hooks for block in model.blocks)


def test_held_out_rows_are_spread_over_documents_and_rows(documents):
    found = study.held_out_rows(documents, 64, at_most=2, rows_each=3)
    starts = [(0, (0, 64, 128)), (1, (0,))]
    expected = [[documents[n][s : s + 65].tolist() for s in firsts] for n, firsts in starts]
    assert [rows.tolist() for rows in found] == expected


def test_a_run_without_time_is_evaluated_and_not_complete(corpus, no_questions):
    class AfterStep1:
        reports = 0

        def __lt__(self, now):
            self.reports += 1
            return self.reports > 1

    study.Study(a_run("nsa"), corpus, corpus, "cpu").go(AfterStep1())
    result = json.loads((corpus / "nsa-seed0.json").read_text())
    assert (result["complete"], result["ended"]) == (False, "the time limit was reached")
    assert [e["tokens"] for e in result["evaluations"]] == [0, 256]
    assert len(result["mass"]) == 2


def test_longer_rows_are_measured_with_the_better_rotary_base(corpus, monkeypatch, no_questions):
    longer = {"rows": [256], "bases": [1e4, 2.0], "questions": 1}
    monkeypatch.setitem(SMALL, "longer", longer)
    result = study.Study(a_run("nsa"), corpus, corpus, "cpu")
    with torch.no_grad():
        for block in result.trainer.model.blocks:  # so that the base matters
            block.attn.qkv.weight *= 5
    result.evaluate()
    (entry,) = result.facts["longer"]
    losses = entry["by_base"]
    assert len(set(losses.values())) == 2
    assert entry["loss"] == losses[f"{entry['rope_base']:g}"] == min(losses.values())
    assert [r["last"] for r in entry["by_position"]] == [32, 64, 128, 256]
    assert len(entry["mass"]) == 2
    unchanged = study.held_out_loss(
        result.trainer.model, study.held_out_rows(study.read_documents(corpus, "held_out"), 256), 1
    )
    assert losses["10000"] == pytest.approx(unchanged["loss"])


@pytest.fixture
def folders(corpus, monkeypatch):
    """Folders of a dense model and of its conversion; two arms of the plan begin with them."""
    dense = study.Study(a_run("dense"), corpus, corpus, "cpu").trainer
    (corpus / "d").mkdir()
    dense.save(corpus / "d")
    sizes = {name: LAYER[name] for name in LAYER if name.endswith(("size", "stride", "blocks"))}
    convert_checkpoint(corpus / "d", corpus / "n", {**sizes, "compress": "mlp"})
    arms = {
        "from_d": {"label": "dense", "attention": "dense", "from": "d"},
        "from_n": {"label": "NSA", "from": "n"},
    }
    small = {**SMALL, "layer": {"rope_base": 5e4}, "arms": arms}
    monkeypatch.setitem(study.PLAN, "small", small)
    return corpus


def test_an_arm_begins_with_a_folder_and_another_rotary_base(folders):
    run = study.Study(a_run("from_d"), folders, folders, "cpu")
    assert run.facts["keys_per_query"] == 129 / 2
    trainer = run.trainer
    assert trainer.model.config.layer.rope_base == 5e4
    old = open_folder(folders / "d").model().state_dict()
    assert all(torch.equal(old[name], new) for name, new in trainer.model.state_dict().items())


def test_each_start_of_a_conversion_is_measured(folders, monkeypatch):
    """Dense attention with both rotary bases, and NSA with each start; two starts are asked."""
    monkeypatch.setattr(starts, "recall_scores", lambda *arguments: [arguments[2:]])
    for old, new in (("d", "dense"), ("n", "nsa")):
        (folders / old).rename(folders / new)
    starts.main("small", folders, folders, "cpu")
    entries = json.loads((folders / "starts-small.json").read_text())["starts"]
    labels = [entry["label"] for entry in entries]
    assert labels == ["dense, rotary base of the model", "dense", *starts.STARTS]
    assert [entry["rope_base"] for entry in entries] == [1e4, *[5e4] * (len(labels) - 1)]
    asked = [entry["label"] for entry in entries if "recall" in entry]
    assert asked == ["dense", "NSA"]
    assert entries[1]["recall"] == [[[16, 32, 64, 128], 32, 256]]
    gates = [entry["mass"] and entry["mass"][1]["gates"] for entry in entries]
    assert gates[:2] == [[], []]
    for found, expected in zip(
        gates[2:5], [(0.1, 0.8, 0.1), (0.02, 0.96, 0.02), (0.01, 0.01, 0.98)]
    ):
        assert [*found.values()] == pytest.approx(expected, rel=0.02)  # in bfloat16
    assert gates[5] == gates[2]
    assert [*gates[6].values()] == pytest.approx([0.5] * 3, abs=0.3)
    assert len({entry["loss"] for entry in entries}) == len(entries)
