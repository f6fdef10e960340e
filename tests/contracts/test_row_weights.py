"""`loss_weights: rows`: under every defense the task's step is that of the mean over rows, or it is refused by name.

The oracle is the gradient of `mean_r mean_{t of r} NLL_t` over the rows of a step, row by row, without padding, by
autograd through log-softmax in float64. The rows have 4 to 7 scored tokens each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.errors import ConfigError, UnsupportedError
from tests import tiny
from tests.contracts.defense_cases import CASES, Case, build, off
from tests.unit.trainers.building import same, weights

RATE = 0.5
ONE_STEP = {
    "max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": RATE,
    "optim": "sgd", "max_grad_norm": 0.0, "dropout": 0.0,
}  # fmt: skip
# Of the fused cases two: for all others the engine is called in the same way.
ROWS = [case for case in CASES if case.step == "auto" or case.name in ("sft", "holdfast")]


def noted_rows(trainer: hf.SafeSFTTrainer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of every row of the step, unpadded, noted while it trains."""
    found, choose = [], trainer.defense.choose_batch

    def noted(run: Any, inputs: Any, items: Any) -> Any:
        inputs, items = choose(run, inputs, items)
        for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
            found.append((ids[mask.bool()].clone(), labels[mask.bool()].clone()))
        return inputs, items

    trainer.defense.choose_batch = noted
    return found


def literal_step(
    model: Any, start: dict[str, torch.Tensor], rows: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """-rate times the gradient at `start`; the model itself, since TRL's forward on a copy would run the original."""
    model.load_state_dict(start, strict=False)
    model.double().zero_grad()
    losses = []
    for ids, labels in rows:
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
        scored = labels[1:] != -100
        losses.append(-log_p[scored].gather(1, labels[1:][scored, None]).mean())
    torch.stack(losses).mean().backward()
    return {name: -RATE * p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_step_of_rows(trainer: hf.SafeSFTTrainer) -> None:
    start, rows = weights(trainer), noted_rows(trainer)
    trainer.train()
    after = weights(trainer)
    assert len({int((labels[1:] != -100).sum()) for _, labels in rows}) > 1, "rows of several lengths"
    for name, step in literal_step(trainer.model, start, rows).items():
        torch.testing.assert_close((after[name] - start[name]).double(), step, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_the_step_is_the_mean_over_rows_or_refused(case, tmp_path):
    if not case.cls.by_rows(case.stage):
        with pytest.raises(UnsupportedError, match=f"loss_weights: rows .* defense '{case.name}'"):
            build(tmp_path, case, loss_weights="rows", **ONE_STEP)
        return
    if case.cls.off is None:
        pytest.skip("has no setting in which it is plain SFT")
    assert_step_of_rows(build(tmp_path, case, **off(case), loss_weights="rows", **ONE_STEP))


def test_few_are_refused():
    assert {str(case) for case in ROWS if not case.cls.by_rows(case.stage)} == {"antibody-finetune", "vaccine-align"}


@pytest.mark.parametrize("step", ["two_pass", "fused"])
def test_a_model_that_divides_by_itself(tmp_path, step):
    """Without the step's count, every micro-batch is a mean over its rows, and they are averaged."""
    trainer = build(tmp_path, Case("sft", "finetune", step), loss_weights="rows", **ONE_STEP)
    trainer.model_accepts_loss_kwargs = False
    assert_step_of_rows(trainer)


@pytest.mark.parametrize("step", ["two_pass", "fused"])
def test_rows_that_a_defense_trains_on_instead(tmp_path, step):
    """Lisa's alignment steps."""
    options = {"align_steps": 1, "finetune_steps": 1, "rho": 0.0}
    assert_step_of_rows(build(tmp_path, Case("lisa", "finetune", step), options, loss_weights="rows", **ONE_STEP))


@pytest.mark.parametrize("scaled", [True, False])
def test_micro_batches_in_parts(tmp_path, scaled):
    """As after running out of memory: three rows in parts of one and two."""
    options = {**ONE_STEP, "per_device_train_batch_size": 3}
    trainer = build(tmp_path, Case("sft", "finetune"), loss_weights="rows", **options)
    trainer.model_accepts_loss_kwargs = scaled
    trainer.run.fitting.parts = 2
    assert_step_of_rows(trainer)


def test_tokens_is_the_default_and_evaluation_keeps_it(tmp_path):
    given = {"given": {"eval_dataset": tiny.dataset(6, seed=9)}}
    found = {
        name: build(tmp_path / str(name), Case("sft", "finetune"), **given, loss_weights=name, **ONE_STEP)
        for name in (None, "tokens", "rows")
    }
    losses = {name: trainer.evaluate()["eval_loss"] for name, trainer in found.items()}
    assert losses["rows"] == losses["tokens"] == losses[None]
    for trainer in found.values():
        trainer.train()
    assert same(weights(found[None]), weights(found["tokens"]))
    assert not same(weights(found[None]), weights(found["rows"]))


@pytest.mark.parametrize(
    ("options", "why"),
    [({"packing": True}, "packing and padding_free join rows"), ({"label_smoothing_factor": 0.1}, "label smoothing")],
)
def test_other_losses_are_refused(tmp_path, options, why):
    with pytest.raises(UnsupportedError, match=why):
        build(tmp_path, Case("sft", "finetune"), loss_weights="rows", **options)


def test_an_older_trl_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.training.row_weights.version", lambda _: "1.9.0")
    with pytest.raises(UnsupportedError, match=r"TRL 1\.9\.0 does not hand over the losses of single tokens"):
        build(tmp_path, Case("sft", "finetune"), loss_weights="rows")


def test_an_unknown_word_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="loss_weights is 'row'") as refused:
        hf.SafeSFTConfig(str(tmp_path), loss_weights="row", use_cpu=True)
    assert "tokens, rows" in refused.value.remedy
