"""kl_token where no fresh adapter can be switched off: held against a copy of the start that was never trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.core.errors import UnsupportedError
from holdfast.core.event_log import read
from holdfast.data.encode import collate
from holdfast.scoring import reference_states
from tests import tiny
from tests.unit.trainers.building import build, weights

TAU, ALPHA = 0.02, 0.25
LIMIT = hf.ChanceConstraint(tau=TAU, alpha=ALPHA, beta=1 / TAU, unit="kl_token")
OPTIONS = {"max_steps": 12, "gradient_accumulation_steps": 2, "safety_batch_size": 12, "safety_micro_batch_size": 12}
IN_PARTS = {"safety_micro_batch_size": 4}
HELD = {"name": "holdfast", "estimator": "table", "reserve": 0.5, "anchor": True}


@dataclass(frozen=True)
class Way:
    """A way of training: the model that enters it, and settings."""

    start: Callable[[], Any]
    rate: float = 3e-3
    options: dict[str, Any] = field(default_factory=dict)


def stacked() -> Any:
    """A fresh adapter on top of one that is frozen: switching both off is not theta_0."""
    model = tiny.continued()
    model.add_adapter("second", tiny.lora())
    model.base_model.set_adapter(["default", "second"])
    for name, p in model.named_parameters():
        p.requires_grad_(".second." in name)
    return model


WAYS = {
    "continued adapter": Way(tiny.continued, options=IN_PARTS),
    "continued adapter, fused": Way(tiny.continued, options={"step": "fused"}),
    "adapter with a head of its own": Way(lambda: tiny.continued(modules_to_save=["lm_head"])),
    "adapter taken from the weights": Way(lambda: tiny.fresh(init_lora_weights="pissa")),
    "DoRA": Way(lambda: tiny.fresh(use_dora=True)),
    "fresh adapter on a frozen one": Way(stacked),
    "all weights, packed": Way(tiny.model, rate=1e-3, options={"packing": True, **IN_PARTS}),
    "all weights, tied": Way(tiny.tied, rate=2e-3),
    "fresh adapter, packed": Way(tiny.fresh, options={"packing": True}),
}


def run(folder, way: Way) -> Any:
    given = {"model": way.start(), "peft_config": None, "constraint": LIMIT, "defense": HELD}
    trainer = build(folder, given=given, **{**OPTIONS, "learning_rate": way.rate, **way.options})
    trainer.train()
    return trainer


def in_float64(way: Way, trainer: Any) -> tuple[Any, Any, dict[str, torch.nn.Parameter]]:
    """The start, loaded anew; the trained model beside it, and its trained parameters."""
    start, end = way.start().double().eval(), way.start().double().eval()
    trained = {name: p for name, p in end.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, value in weights(trainer).items():
            trained[name].copy_(value)
    return start, end, trained


def kl(start: Any, end: Any, row: Any) -> torch.Tensor:
    """Mean over the completion of `sum_v p0(v) (log p0(v) - log p(v))`, from whole logits."""
    batch = collate([row], 0)
    scored = batch["labels"][0, 1:] != -100
    ids = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        log_p0 = torch.log_softmax(start(**ids).logits[0, :-1][scored], -1)
    log_p = torch.log_softmax(end(**ids).logits[0, :-1][scored], -1)
    return (log_p0.exp() * (log_p0 - log_p)).sum(-1).mean()


@pytest.mark.parametrize("name", WAYS)
def test_a_run_ends_within_its_limit_as_a_copy_of_its_start_finds(tmp_path, name):
    way = WAYS[name]
    trainer = run(tmp_path, way)
    assert any(row["active"] for row in read(trainer.run_dir / "events.jsonl"))
    assert (len(trainer.train_dataset) < 12) == way.options.get("packing", False)
    one, engine = trainer.safety["safety"], trainer.run.engine
    assert all(len(e.input_ids) <= 16 for e in one.all_encoded)  # of the safety rows none is packed
    assert engine.fused == (way.options.get("step") == "fused")
    # A fresh adapter is nudged while the floor is measured, so that rounding shows: in float32 a KL of 1e-7.
    assert one.noise_floor < (1e-6 if trainer.run.theta_0.idle_adapter else 1e-9)
    start, end, trained = in_float64(way, trainer)
    for role, rows in (("constraint", one.constraint_set), ("monitor", one.monitor_set)):
        with torch.no_grad():
            expected = torch.stack([kl(start, end, row) for row in rows])
        assert float(expected.mean()) > 1e-4
        torch.testing.assert_close(trainer.degradations(role=role), expected, rtol=1e-3, atol=1e-7)
        assert role == "monitor" or float(LIMIT.value(expected)) <= 0
    if not engine.fused:
        found = engine.measure({"safety": lambda d: d})["safety"]
        mean = torch.stack([kl(start, end, one.constraint_set[i]) for i in found.index.tolist()]).mean()
        names = {id(p): name for name, p in trainer.model.named_parameters()}
        ordered = [trained[names[id(p)]] for p in trainer.run.space().params]
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(mean, ordered)])
        own = torch.cat([g.flatten() for g in found.gradient]).double()
        assert float((own - expected).norm() / expected.norm()) < 1e-3


def test_states_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_states, "MOST", 1000)
    given = {"model": tiny.continued(), "peft_config": None, "constraint": LIMIT}
    with pytest.raises(UnsupportedError, match="keeps the reference's hidden states") as caught:
        build(tmp_path, given=given)
    assert "fresh adapter" in caught.value.remedy
    build(tmp_path, given={**given, "model": tiny.fresh()})  # which keeps none
