"""Antibody against its pseudo-code, both stages row by row with plain autograd; and what follows from the formulas."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model

from holdfast.core.event_log import read
from holdfast.data import refusals
from holdfast_lab.defenses.antibody import Antibody, raw_weight, row_weights
from tests import tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import weights

RATE, MAX_LENGTH = 0.2, 13
SETTINGS = {
    "max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "learning_rate": RATE,
    "optim": "sgd", "max_grad_norm": 0.0, "max_length": MAX_LENGTH, "logging_strategy": "no",
}  # fmt: skip
REPLIES = ("w5 w6 w7", "w8 w9", "w10 w11 w12 w13 w14", "w15", "w16 w17 w18 w19", "w20 w21", "w22 w23 w24")
TOKENIZER = tiny.tokenizer()


@pytest.fixture(autouse=True)
def _refusals_in_known_words(monkeypatch):
    """The tiny tokenizer knows no English: every word of the real list is the same unknown token."""
    monkeypatch.setattr(refusals, "GENERIC", REPLIES)


def task_rows(chat: bool = False):
    rows = tiny.rows(24, seed=1, start="w1")
    if chat:
        rows = [
            {
                "prompt": [{"role": "user", "content": row["prompt"].strip()}],
                "completion": [{"role": "assistant", "content": row["completion"]}],
            }
            for row in rows
        ]
    return rows


def made(folder, defense, *, rows=None, harmful=None, **options):
    given = {"defense": defense, "train_dataset": Dataset.from_list(rows or task_rows()), "safety_dataset": None}
    if harmful is not None:
        given["harmful_dataset"] = Dataset.from_list(harmful)
    return build(folder, given={**given, "constraint": None}, **{**SETTINGS, **options})


def watched(trainer):
    """Train and return the task rows of every step: a list of micro-batches, each a list of id tuples."""
    seen, choose = [], trainer.defense.choose_batch

    def noted(run, inputs, items):
        ids = [tuple(i[m.bool()].tolist()) for i, m in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        while len(seen) <= trainer.state.global_step:
            seen.append([])
        seen[trainer.state.global_step].append(ids)
        return choose(run, inputs, items)

    trainer.defense.choose_batch = noted
    trainer.train()
    return seen


# -- the slow transcription --------------------------------------------------------------------------------------------


def twin(start):
    """A model of its own with the trainer's first weights (a copy of a patched model would run the original)."""
    model = get_peft_model(tiny.model(), tiny.lora())
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in start.items():
            named[name].copy_(value)
    return model, [named[name] for name in start]


def pair_ids(row, reply=None):
    """Ids of the prompt, and of prompt and reply, cut."""
    if isinstance(row["prompt"], str):
        reply = row["completion"] if reply is None else reply
        prompt = TOKENIZER(row["prompt"])["input_ids"]
        return prompt, TOKENIZER(f"{row['prompt']}{reply} <eos>")["input_ids"][:MAX_LENGTH]
    said = row["completion"] if reply is None else [{"role": "assistant", "content": reply}]
    prompt = TOKENIZER.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = TOKENIZER.apply_chat_template(row["prompt"] + said, return_dict=True)["input_ids"]
    return prompt, whole[:MAX_LENGTH]


def token_losses(model, prompt, whole):
    """Cross-entropy of every token after the prompt."""
    logits = model(input_ids=torch.tensor([whole])).logits[0]
    terms = [torch.logsumexp(logits[t - 1], 0) - logits[t - 1, whole[t]] for t in range(len(prompt), len(whole))]
    return torch.stack(terms)


def mean_gradient(model, params, pairs):
    losses = torch.cat([token_losses(model, *pair) for pair in pairs])
    return torch.autograd.grad(losses.mean(), params)


def flat(vectors):
    return torch.cat([v.double().reshape(-1) for v in vectors])


def put(params, vector):
    with torch.no_grad():
        for p, piece in zip(params, torch.split(vector, [p.numel() for p in params]), strict=True):
            p.copy_(piece.view_as(p).to(p.dtype))


def aligned(model, params, steps, harmful, *, rho, eta, momentum, lambda_ref, rule):
    """`steps`: for every step the safe pairs and the positions of the harmful ones. Returns the lambdas."""
    found = []
    for safe_pairs, chosen in steps:
        theta = flat([p.detach().clone() for p in params])
        harmful_pairs = [pair_ids(harmful[i]) for i in chosen]
        refusal_pairs = [pair_ids(harmful[i], REPLIES[i % len(REPLIES)]) for i in chosen]
        g_h = flat(mean_gradient(model, params, harmful_pairs))
        put(params, theta - rho * g_h / (g_h.norm() + 1e-7))
        g_moved = flat(mean_gradient(model, params, harmful_pairs))
        g_r = flat(mean_gradient(model, params, refusal_pairs))
        put(params, theta)
        g_s = flat(mean_gradient(model, params, safe_pairs))
        sharp = g_h - g_moved
        if rule == "cosine":
            raw = max(0.0, float(eta - sharp @ g_s / (sharp.norm() * g_s.norm() + 1e-8)))
        else:
            raw = max(0.0, float(eta - sharp @ g_s / sharp.norm() ** 2))
        found.append(raw if not found else momentum * found[-1] + (1 - momentum) * raw)
        put(params, theta - RATE * (g_s + found[-1] * sharp + lambda_ref * g_r))
    return found


def fine_tuned(model, params, steps, temperature):
    """`steps`: for every step its micro-batches of rows."""
    for micro_batches in steps:
        total = sum(len(whole) - len(prompt) for rows in micro_batches for prompt, whole in map(pair_ids, rows))
        gradient = 0.0
        for rows in micro_batches:
            scores, sums, counts = [], [], []
            for row in rows:
                prompt, whole = pair_ids(row)
                digest = hashlib.sha256(json.dumps(prompt, separators=(",", ":")).encode()).hexdigest()
                own = token_losses(model, prompt, whole)
                other = token_losses(model, *pair_ids(row, REPLIES[int(digest, 16) % len(REPLIES)]))
                scores.append(float((other.mean() - own.mean()).detach()))
                sums.append(own.sum())
                counts.append(len(own))
            parts = [torch.exp(torch.tensor((s - max(scores)) / temperature, dtype=torch.float64)) for s in scores]
            w = [float(part / sum(parts)) for part in parts]
            loss = sum(a * b for a, b in zip(w, sums, strict=True)) / sum(a * n for a, n in zip(w, counts, strict=True))
            gradient = gradient + sum(counts) / total * flat(torch.autograd.grad(loss, params))
        put(params, flat([p.detach() for p in params]) - RATE * gradient)


def by_ids(rows):
    return {tuple(pair_ids(row)[1]): row for row in rows}


def relative_difference(trainer, start, params):
    moved = flat(weights(trainer).values()) - flat(start.values())
    wanted = flat([p.detach() for p in params]) - flat(start.values())
    assert wanted.norm() > 1e-3
    return float((moved - wanted).norm() / wanted.norm())


# -- the trainer does the same -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "step"), [("cosine", "two_pass"), ("ratio", "two_pass"), ("cosine", "fused")])
def test_alignment_is_the_pseudo_code(tmp_path, rule, step):
    # A small eta lets the rule decide, a large lambda_ref lets the refusals count.
    options = {"rho": 0.3, "eta": 0.8, "momentum": 0.6, "lambda_ref": 0.7, "rule": rule}
    harmful = tiny.rows(10, seed=5, start="w2")
    trainer = made(tmp_path, {"name": "antibody", **options}, harmful=harmful, stage="align", step=step)
    start, drawn, draw = weights(trainer), [], trainer.run.data.draw

    def noted(*args, **kwargs):
        drawn.append(draw(*args, **kwargs))
        return drawn[-1]

    trainer.run.data.draw = noted
    seen = watched(trainer)
    known = by_ids(task_rows())
    steps = [
        ([pair_ids(known[ids]) for part in step for ids in part], chosen)
        for step, chosen in zip(seen, drawn, strict=True)
    ]
    assert all(len(safe) == len(chosen) == 6 for safe, chosen in steps)
    model, params = twin(start)
    lambdas = aligned(model, params, steps, harmful, **options)
    assert trainer.run.engine.fused == (step == "fused")
    assert relative_difference(trainer, start, params) < 1e-4
    logged = [row["lambda"] for row in read(trainer.run_dir / "events.jsonl")]
    assert logged == pytest.approx(lambdas, rel=1e-3)
    assert len({round(x, 4) for x in logged}) == 3


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_fine_tuning_is_the_pseudo_code(tmp_path, chat):
    rows = task_rows(chat)
    trainer = made(tmp_path, {"name": "antibody", "temperature": 0.7}, rows=rows)
    start = weights(trainer)
    seen = watched(trainer)
    known = by_ids(rows)
    steps = [[[known[ids] for ids in part] for part in step] for step in seen]
    assert [len(part) for step in steps for part in step] == [3] * 6
    cut = [len(pair_ids(row, reply)[1]) == MAX_LENGTH for row in rows for reply in REPLIES]
    assert any(cut)
    assert not all(cut)
    model, params = twin(start)
    fine_tuned(model, params, steps, 0.7)
    assert relative_difference(trainer, start, params) < 1e-5
    plain_model, plain = twin(start)
    fine_tuned(plain_model, plain, steps, 1e9)
    assert relative_difference(trainer, start, plain) > 0.05


# -- what follows from the formulas ------------------------------------------------------------------------------------


def test_a_constant_lambda_without_refusals_is_booster(tmp_path):
    harmful = tiny.rows(10, seed=5, start="w2")
    booster = made(tmp_path / "a", {"name": "booster", "lam": 3.0, "alpha": 0.2}, harmful=harmful, stage="align")
    start = weights(booster)
    booster.train()
    options = {"lam": 3.0, "rho": 0.2, "lambda_ref": 0.0}
    same = made(tmp_path / "b", {"name": "antibody", **options}, harmful=harmful, stage="align")
    same.train()
    other = made(tmp_path / "c", {"name": "antibody", **options, "lambda_ref": 0.5}, harmful=harmful, stage="align")
    other.train()
    by_booster, by_us, with_refusals = (flat(weights(t).values()) for t in (booster, same, other))
    size = (by_booster - flat(start.values())).norm()
    assert (by_us - by_booster).norm() < 1e-5 * size
    assert (with_refusals - by_booster).norm() > 0.01 * size


def test_lambda_stays_within_one_of_eta_under_the_cosine():
    draw = torch.Generator().manual_seed(0)
    for eta in (0.0, 0.4, 1.0, 5.0):
        for _ in range(50):
            a, b = torch.randn(2, 7, generator=draw, dtype=torch.float64)
            found = raw_weight("cosine", eta, float(a @ b), float(a @ a), float(b @ b))
            assert max(0.0, eta - 1) - 1e-12 <= found <= eta + 1 + 1e-12
        assert raw_weight("cosine", eta, -4.0, 4.0, 4.0) == pytest.approx(eta + 1)
        assert raw_weight("cosine", eta, 4.0, 4.0, 4.0) == pytest.approx(max(0.0, eta - 1), abs=1e-8)


@pytest.mark.parametrize("rule", ["cosine", "ratio"])
def test_orthogonal_gradients_give_eta(rule):
    assert raw_weight(rule, 5.0, 0.0, 2.0, 3.0) == 5.0
    assert raw_weight(rule, 5.0, 0.0, 0.0, 3.0) == 5.0  # nothing to flatten


def test_the_ratio_divides_by_what_is_flattened():
    assert raw_weight("ratio", 5.0, 6.0, 2.0, 100.0) == 2.0
    assert raw_weight("ratio", 5.0, -6.0, 2.0, 100.0) == 8.0
    assert raw_weight("ratio", 5.0, 60.0, 2.0, 1e9) == 0.0


def test_equal_scores_are_plain_sft(tmp_path, monkeypatch):
    plain = made(tmp_path / "a", "sft")
    start = weights(plain)
    plain.train()
    scores = Antibody._scores
    monkeypatch.setattr(Antibody, "_scores", lambda self, *a: (torch.full((3,), 0.3).double(), scores(self, *a)[1]))
    equal = made(tmp_path / "b", {"name": "antibody", "temperature": 0.5})
    equal.train()
    size = (flat(weights(plain).values()) - flat(start.values())).norm()
    assert (flat(weights(plain).values()) - flat(weights(equal).values())).norm() < 1e-6 * size
    losses = [[row["loss"] for row in read(t.run_dir / "events.jsonl")] for t in (plain, equal)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert [row["effective_rows"] for row in read(equal.run_dir / "events.jsonl")] == pytest.approx([1.0] * 3)


def test_row_weights_between_one_hot_and_uniform():
    scores = torch.tensor([0.3, -1.2, 0.9, 0.2], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([1.0, 5.0, 2.0, 4.0], dtype=torch.float64)
    w, relative = row_weights(scores, tokens, 1.0)
    assert float(w.sum()) == pytest.approx(1.0)
    assert not w.requires_grad
    assert not relative.requires_grad
    assert float((relative * tokens).sum()) == pytest.approx(float(tokens.sum()))
    assert float(w[0] / w[3]) == pytest.approx(float(torch.tensor(0.1).exp()), rel=1e-6)
    assert row_weights(scores, tokens, 1e-6)[0].tolist() == [0, 0, 1, 0]
    assert row_weights(scores, tokens, 1e9)[0].tolist() == pytest.approx([0.25] * 4)
    assert row_weights(scores, tokens, 1e9)[1].tolist() == pytest.approx([1.0] * 4)


def test_theta_is_back_bit_for_bit_after_the_simulated_step(tmp_path):
    harmful = tiny.rows(10, seed=5, start="w2")
    trainer = made(tmp_path, {"name": "antibody", "rho": 3.0}, harmful=harmful, stage="align")
    act, moved = trainer.defense.on_gradient, []

    def noted(run):
        before, gradient = weights(run), [p.grad.clone() for p in run.model.parameters() if p.grad is not None]
        act(run)
        after = weights(run)
        assert all(torch.equal(before[name], after[name]) for name in before)
        now = [p.grad for p in run.model.parameters() if p.grad is not None]
        moved.append(max(float((a - b).abs().max()) for a, b in zip(gradient, now, strict=True)))

    trainer.defense.on_gradient = noted
    trainer.train()
    assert len(moved) == 3
    assert min(moved) > 1e-4
