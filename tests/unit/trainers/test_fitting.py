"""Out of memory in training: the same steps in smaller passes, recorded; a row that does not fit ends the run."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests import tiny
from tests.unit.trainers.building import TIGHT, build, weights

from holdfast.core.errors import ResourceError
from holdfast.core.event_log import read
from holdfast.training import side_pass
from holdfast.training.fitting import split
from holdfast.training.zero import Parts

LABELS = torch.tensor([[-100, 5, 6, 7], [-100, -100, 5, -100], [-100, -100, -100, -100], [-100, 5, 6, -100]])


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")


def limit_rows(trainer, most, where="forward", steps=None, from_micro=0):
    """From now on the model holds only so many task rows a pass: more of them run out of memory."""
    inner = trainer.model.forward
    failed = []

    def forward(*args, **kwargs):
        rows = kwargs["input_ids"].shape[0]
        scarce = (
            trainer.model.training
            and (steps is None or trainer.run.progress.step in steps)
            and trainer.run.progress.micro >= from_micro
        )
        if not scarce or rows <= most or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        failed.append(rows)
        if where == "forward":
            full()
        pending.append(rows)
        return inner(*args, **kwargs)

    pending = []
    trainer.model.forward = forward
    if where == "backward":
        # Of the first layer, so that most of the gradient has been accumulated by then.
        weight = trainer.model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"].weight

        def late(gradient):
            if pending:
                pending.clear()
                full()
            return gradient

        weight.register_hook(late)
    return failed


def trained(folder, *, most=None, where="forward", steps=None, from_micro=0, defense="holdfast", **options):
    given = {"constraint": TIGHT, "defense": defense, "train_dataset": tiny.dataset(24, seed=1, start="w1")}
    settings = {"max_steps": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, **options}
    trainer = build(folder, given=given, **settings)
    failed = [] if most is None else limit_rows(trainer, most, where, steps, from_micro)
    trainer.train()
    return trainer, failed


def close(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("from_micro", [0, 1])
def test_the_same_steps_in_parts(tmp_path, where, from_micro):
    """Rows of unequal length, an odd number of them, two micro-batches a step; the second may be the one that fails."""
    whole, _ = trained(tmp_path / "whole")
    parted, failed = trained(tmp_path / "parted", most=2, where=where, steps={1}, from_micro=from_micro)
    assert failed == [3]  # once: from then on the passes are smaller
    close(weights(whole), weights(parted))
    rows, expected = (read(t.run_dir / "events.jsonl") for t in (parted, whole))
    assert [row.get("memory") for row in rows] == [None, {"parts": 2}, {"parts": 2}, {"parts": 2}]
    for row, other in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["g"] == pytest.approx(other["g"], rel=1e-4, abs=1e-6)
        assert row["event"] == other["event"]


def test_it_goes_on_down_to_single_rows_and_then_ends(tmp_path):
    whole, _ = trained(tmp_path / "whole", max_steps=2)
    parted, failed = trained(tmp_path / "parted", most=1, max_steps=2)
    assert failed[0] == 3
    assert parted.run.fitting.figures()["parts"] == 4  # three rows: one each, and an empty part
    close(weights(whole), weights(parted))
    with pytest.raises(ResourceError, match="step 1 with a single row a pass: CUDA out of memory") as caught:
        trained(tmp_path / "none", most=0)
    assert caught.value.exit_code == 7
    assert "More of it" not in caught.value.what
    assert "gradient_checkpointing=True" in caught.value.remedy
    assert "under `train:` in a run file" in caught.value.remedy


def test_a_model_that_divides_by_its_own_tokens(tmp_path, monkeypatch):
    """Without the step's token count each pass is a mean: parts are weighted by their tokens."""
    from trl import SFTTrainer

    monkeypatch.setattr(SFTTrainer, "_get_num_items_in_batch", lambda *_: None)
    whole, _ = trained(tmp_path / "whole", defense="sft")
    parted, failed = trained(tmp_path / "parted", most=2, steps={0}, defense="sft")
    assert failed
    close(weights(whole), weights(parted))


def test_a_defense_whose_step_is_no_sum_is_left_to_run_out(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, most=2, defense="vaccine", stage="align")


def test_under_deepspeed_nothing_is_passed_over_again(tmp_path):
    """Its own buffers keep the gradient of what failed, which would count twice; tests/deepspeed has the real one."""
    trainer = build(tmp_path)
    assert trainer.run.fitting._divisible({"labels": LABELS})
    trainer.run.parts = mock.Mock(spec=Parts)
    assert not trainer.run.fitting._divisible({"labels": LABELS})


def test_safety_rows_are_passed_over_in_smaller_batches(tmp_path, monkeypatch):
    whole, _ = trained(tmp_path / "whole")
    inner = side_pass.degradation  # type: ignore[attr-defined]

    def scarce(model, batch, *args, **kwargs):
        return full() if batch["input_ids"].shape[0] > 1 else inner(model, batch, *args, **kwargs)

    monkeypatch.setattr(side_pass, "degradation", scarce)
    parted, _ = trained(tmp_path / "parted")
    assert parted.run.fitting.figures() == {"side_rows": 1}
    close(weights(whole), weights(parted))


def test_the_monitor_split_is_looked_at_in_smaller_batches(tmp_path, monkeypatch):
    trainer, _ = trained(tmp_path, max_steps=1)
    expected = trainer.degradations()
    inner = trainer.model.forward

    def forward(*args, **kwargs):
        return full() if kwargs["input_ids"].shape[0] > 2 else inner(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", forward)
    torch.testing.assert_close(trainer.degradations(), expected, rtol=1e-5, atol=1e-6)
    assert trainer.run.fitting.figures() == {"eval_rows": 2}


def test_a_resumed_run_goes_on_in_the_same_parts(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, _ = trained(tmp_path, most=2, steps={1}, **saving)
    given = {"constraint": TIGHT, "train_dataset": tiny.dataset(24, seed=1, start="w1")}
    again = build(tmp_path, given=given, per_device_train_batch_size=3, gradient_accumulation_steps=2, **saving)
    again.train(resume_from_checkpoint=str(whole.store.root / "checkpoint-2"))
    assert again.run.fitting.figures() == {"parts": 2}
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_parts_hold_every_row_once_and_shares_add_up(parts):
    inputs = {"input_ids": torch.arange(16).reshape(4, 4), "labels": LABELS, "use_cache": False}
    pieces = list(split(inputs, parts))
    kept = torch.cat([piece["input_ids"] for piece, _ in pieces])
    scored = (LABELS[:, 1:] != -100).sum(1)
    assert sum(share for _, share in pieces) == pytest.approx(1.0)
    for piece, share in pieces:
        assert share == pytest.approx(int((piece["labels"][:, 1:] != -100).sum()) / int(scored.sum()))
        assert piece["use_cache"] is False
    rows = range(4) if parts < 4 else [0, 1, 3]  # a row without a scored token alone has no loss
    assert torch.equal(kept, inputs["input_ids"][list(rows)])
