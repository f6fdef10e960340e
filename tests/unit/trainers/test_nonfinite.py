"""A step with a NaN anywhere is discarded without a trace, named in the log, and refused when it keeps happening."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch
from tests.unit.trainers.building import TIGHT, build, same, weights
from transformers import TrainerCallback

from holdfast.core.errors import NumericalError
from holdfast.training import side_pass


class Snapshots(TrainerCallback):
    def __init__(self):
        self.weights, self.moments = [], []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **_):
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
        inner = getattr(optimizer, "optimizer", optimizer)
        self.moments.append([s["exp_avg"].clone() for s in inner.state.values()])


def poison_task(trainer, steps):
    inner = trainer.compute_loss

    def spoiled(model, inputs, *args, **kwargs):
        found = inner(model, inputs, *args, **kwargs)
        return found * math.nan if model.training and trainer.run.progress.step in steps else found

    trainer.compute_loss = spoiled


def poison_safety(trainer, steps, monkeypatch):
    inner = side_pass.degradation  # type: ignore[attr-defined]

    def spoiled(*args, **kwargs):
        found = inner(*args, **kwargs)
        return found * math.nan if trainer.run.progress.step in steps else found

    monkeypatch.setattr(side_pass, "degradation", spoiled)


def strict_rows(path):
    def refuse(constant):
        raise AssertionError(f"{constant} in {path}")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("space", ["update", "gradient"])
@pytest.mark.parametrize("where", ["task", "safety"])
def test_the_step_is_discarded(tmp_path, monkeypatch, where, space):
    shots = Snapshots()
    given = {"callbacks": [shots], "constraint": TIGHT, "defense": {"name": "holdfast", "space": space}}
    trainer = build(
        tmp_path, given=given, max_steps=6, logging_steps=1, weight_decay=0.1, save_strategy="steps", save_steps=3
    )
    if where == "task":
        poison_task(trainer, {2})
    else:
        poison_safety(trainer, {2}, monkeypatch)
    trainer.train()

    rows = strict_rows(trainer.run_dir / "events.jsonl")
    assert [row["event"] == "nonfinite" for row in rows] == [False, False, True, False, False, False]
    assert [row.get("nonfinite") for row in rows if row.get("nonfinite")] == [
        "task gradient" if where == "task" else "value of constraint 1"
    ]
    assert (rows[2]["loss"] is None) == (where == "task")
    assert (rows[2]["g"] is None) == (where == "safety")
    assert same(shots.weights[1], shots.weights[2])
    assert all(torch.equal(a, b) for a, b in zip(shots.moments[1], shots.moments[2], strict=True))
    assert not same(shots.weights[2], shots.weights[3])
    state = trainer.defense.state_dict()
    assert all(torch.isfinite(x).all() for average in state["filter"]["averages"] for x in average)
    assert all(math.isfinite(row["g"]) for i, row in enumerate(rows) if i != 2 or where == "task")
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())


@pytest.mark.parametrize("where", ["task", "safety"])
def test_the_fourth_time_ends_the_run(tmp_path, monkeypatch, where):
    trainer = build(tmp_path, given={"constraint": TIGHT}, max_steps=9)
    steps = {1, 2, 4, 6}
    if where == "task":
        poison_task(trainer, steps)
    else:
        poison_safety(trainer, steps, monkeypatch)
    with pytest.raises(NumericalError, match="4 of the last 100 steps") as caught:
        trainer.train()
    assert caught.value.exit_code == 5
    assert trainer.run.progress.step == 6
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())


def test_three_times_do_not(tmp_path):
    trainer = build(tmp_path, given={"constraint": TIGHT}, max_steps=6)
    poison_task(trainer, {1, 2, 4})
    trainer.train()
    events = [row["event"] for row in strict_rows(trainer.run_dir / "events.jsonl")]
    assert events.count("nonfinite") == 3


def test_no_stored_json_holds_a_nan(tmp_path):
    trainer = build(
        tmp_path, given={"constraint": TIGHT}, max_steps=3, logging_steps=1, save_strategy="steps", save_steps=3
    )
    poison_task(trainer, {1})
    trainer.train()
    files = [*trainer.run_dir.rglob("*.json")]
    assert len(files) > 5
    for path in files:
        json.loads(
            path.read_text(),
            parse_constant=lambda constant, path=path: pytest.fail(f"{constant} in {path.name}"),  # type: ignore[misc]
        )


@pytest.mark.parametrize("breaks", [False, True])
def test_cudnn_attention_is_off_in_training_and_on_again_afterwards(tmp_path, breaks):
    """Its backward gives NaN for masked batches of some lengths on Hopper GPUs."""
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, *_, **__):
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            if breaks:
                raise KeyboardInterrupt

    before = torch.backends.cuda.cudnn_sdp_enabled()
    trainer = build(tmp_path, given={"callbacks": [Look()]}, max_steps=1)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    assert seen == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
