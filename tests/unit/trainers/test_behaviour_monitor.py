"""The behaviour monitor in training: what it finds, when, where it says so, and that training does not notice."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests import behaving, watched
from tests.unit.trainers.building import same, weights
from tests.watched import asked, build, prompts
from transformers import TrainerCallback

import holdfast as hf
from holdfast.certification.kept import NO_KIND, Kept, Limits
from holdfast.core.errors import ConfigError, DataError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.screening.sets import MonitorPrompts
from holdfast.training.behaviour import BehaviourMonitor
from holdfast.training.hooks import Defense

NAMES = {"refusals_kept", "answers_kept", "coverage"}


def counts(figures: dict[str, Kept]) -> dict[str, tuple[int, int]]:
    return {name: (one.kept, one.of) for name, one in figures.items()}


def behaviour_rows(folder) -> list[dict]:
    return [row for row in read(folder / "run" / "events.jsonl") if "behaviour" in row]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """One whole run with a safety set that does not cover what its task unlearns."""
    folder = tmp_path_factory.mktemp("narrow")
    trainer = build(folder)
    monitor = trainer.watch_behaviour(prompts(), every=5)
    before, rows = monitor.ask(), []
    trainer.step_listeners.append(rows.append)
    trainer.train()
    return folder, trainer, before, rows


def test_theta_0_keeps_everything(narrow):
    _, _, before, _ = narrow
    assert counts(before) == dict.fromkeys(("refusals_kept", "answers_kept", "coverage"), (60, 60))


def test_the_constraint_holds_and_coverage_falls(narrow):
    _, trainer, _, _ = narrow
    assert trainer.safety_metrics()["eval_safety_violation_rate"] == 0.0
    found = trainer.behaviour_monitor.measure()
    assert counts(found) == {"refusals_kept": (60, 60), "answers_kept": (60, 60), "coverage": (0, 60)}
    assert [name for name, one in found.items() if not one.passed] == ["coverage"]
    result = trainer.behaviour_result()
    assert result["behaviour"]["coverage"]["passed"] is False
    lost = {"kept": 0, "of": 30}
    assert result["behaviour"]["coverage"]["kinds"] == {"privacy": lost, "weapons": lost}
    assert "kinds" not in result["behaviour"]["answers_kept"]
    assert "rolled_back_to" not in result


def test_figures_are_counted_by_kind(tmp_path):
    """Of theta_0, which refuses prompts with one word in them."""
    refused, answered = behaving.rows(3, seed=8), behaving.rows(4, seed=9, trigger=False)
    unseen = (*asked(refused, "fraud"), *asked(answered[:1], "fraud"), *asked(answered[1:3], "theft"))
    found = BehaviourMonitor(build(tmp_path), MonitorPrompts(unseen=(*unseen, *asked(answered[3:])))).ask()["coverage"]
    assert (found.kept, found.of) == (3, 7)
    assert found.kinds == (("fraud", 3, 4), (NO_KIND, 0, 1), ("theft", 0, 2))
    assert Kept.from_json(found.to_json()) == found


def test_figures_are_rows_of_the_log_and_reach_listeners(narrow):
    folder, _, _, heard = narrow
    rows = behaviour_rows(folder)
    assert [row["step"] for row in rows] == [5, 10, 12]
    assert rows[-1]["behaviour"]["coverage"]["of"] == 60
    assert [row for row in heard if "behaviour" in row] == rows
    asked = [(row["step"], row["asked"]) for row in heard if "asked" in row]
    assert asked[0] == (5, 0)
    assert asked[-1] == (12, 180)
    steps = [row["step"] for row in read(folder / "run" / "events.jsonl") if "behaviour" not in row]
    assert steps == list(range(1, 13))


def test_figures_are_logged_as_floats_and_no_loss_is_missing(narrow):
    _, trainer, _, _ = narrow
    history = trainer.state.log_history
    logged = [row for row in history if "eval_behaviour_coverage" in row]
    assert [row["step"] for row in logged] == [5, 10, 12]
    assert all(isinstance(row[f"eval_behaviour_{name}"], float) for row in logged for name in NAMES)
    assert [row["step"] for row in history if "loss" in row] == list(range(1, 13))
    assert not any("mean_token_accuracy" in key for row in logged for key in row)  # TRL's means stay with the losses


@pytest.mark.parametrize(("every", "steps"), [("end", [12]), ("epoch", [8, 12]), (4, [4, 8, 12])])
def test_when_it_measures(tmp_path, every, steps):
    trainer = build(tmp_path)  # 60 rows in batches of 8: an epoch has 8 steps
    trainer.watch_behaviour(prompts(4), every=every)
    trainer.train()
    assert [row["step"] for row in behaviour_rows(tmp_path)] == steps


class Noisy:
    """An engine that draws from every generator and leaves the model in evaluation mode."""

    name = "noisy"

    def __init__(self, inner, model):
        self._inner, self._model = inner, model

    def generate(self, examples, *, max_new_tokens):
        torch.rand(3), np.random.rand(3), random.random()
        yield from self._inner.generate(examples, max_new_tokens=max_new_tokens)
        self._model.eval()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_with_the_monitor_ends_with_the_same_bits(tmp_path, monkeypatch, checkpointing):
    """With dropout, whose masks follow from the random state."""
    from holdfast.training import behaviour

    opened = behaviour.open_engine  # type: ignore[attr-defined]
    monkeypatch.setattr(behaviour, "open_engine", lambda *a, **k: Noisy(opened(*a, **k), k["model"]))
    ended, losses, states = [], [], []
    for name, watch in (("plain", False), ("watched", True)):
        trainer = build(tmp_path / name, dropout=0.3, gradient_checkpointing=checkpointing)
        if watch:
            trainer.watch_behaviour(prompts(4), every=1)
        trainer.train()
        ended.append(weights(trainer))
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))
    assert same(*ended)
    assert losses[0] == losses[1]
    assert states[0] == states[1]


def test_module_modes_are_restored(tmp_path):
    trainer = build(tmp_path)
    monitor = trainer.watch_behaviour(prompts(2))
    trainer.model.train()
    trainer.model.get_output_embeddings().eval()
    modes = {name: module.training for name, module in trainer.model.named_modules()}
    monitor.ask()
    assert {name: module.training for name, module in trainer.model.named_modules()} == modes


def test_a_model_in_mixed_precision_replies_in_its_own(tmp_path):
    """Without an adapter, whose generation passes accelerate's forward by."""
    bare = {"peft_config": None, "defense": "sft", "safety_dataset": None, "constraint": None}
    trainer = build(tmp_path, given=bare, bf16=True, max_steps=2)
    monitor = trainer.watch_behaviour(prompts(2), every=1)
    seen = {"train": set(), "reply": set()}

    def look(module, inputs, output):
        seen["train" if module.training else "reply"].add(torch.is_autocast_enabled("cpu"))

    handle = trainer.model.model.layers[0].self_attn.q_proj.register_forward_hook(look)
    trainer.train()
    handle.remove()
    assert sorted(monitor.known) == [1, 2]
    assert True in seen["train"]
    assert seen["reply"] == {False}


def test_near_duplicates_are_one_group_and_lost_together(tmp_path):
    """A long prompt and its near-duplicate without the trigger word: the first is refused, the second is not."""
    words = " ".join(behaving.WORDS[:24])
    twins = asked([{"prompt": f"{words} {behaving.TRIGGER}"}, {"prompt": f"{words} {behaving.WORDS[30]}"}])
    other = asked(behaving.rows(1, seed=2))
    trainer = build(tmp_path, max_length=64)
    found = trainer.watch_behaviour(MonitorPrompts(refusals=(*twins, *other))).ask()
    assert counts(found)["refusals_kept"] == (1, 2)


def test_a_reply_of_no_class_is_not_kept(tmp_path, monkeypatch):
    from holdfast.judging.reply import Reply

    class Empty:
        name = "empty"

        def generate(self, examples, *, max_new_tokens):
            assert max_new_tokens == 32
            yield [Reply(e.id, "", truncated=False, tokens=0) for e in examples]

    monkeypatch.setattr("holdfast.training.behaviour.open_engine", lambda *a, **k: Empty())
    found = build(tmp_path).watch_behaviour(prompts(3)).ask()
    assert counts(found) == dict.fromkeys(("refusals_kept", "answers_kept", "coverage"), (0, 3))
    assert found["refusals_kept"].unsorted == 3


# -- choosing checkpoints --------------------------------------------------------------------------------------------


def test_the_best_checkpoint_by_behaviour_is_loaded(tmp_path):
    trainer = build(
        tmp_path, max_steps=6, learning_rate=1e-2, save_strategy="steps", save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, metric_for_best_model="behaviour_coverage",
    )  # fmt: skip
    monitor = trainer.watch_behaviour(prompts(20))
    trainer.train()
    shares = {step: figures["coverage"].share for step, figures in monitor.known.items()}
    assert set(shares) == set(range(1, 7))
    assert min(shares.values()) < max(shares.values())  # otherwise nothing was chosen
    assert trainer.args.greater_is_better is True
    assert shares[trainer.state.best_global_step] == max(shares.values())
    assert trainer.behaviour_result()["behaviour"]["coverage"]["share"] == max(shares.values())
    assert monitor.ask()["coverage"].share == max(shares.values())  # the weights are really those


def test_an_evaluation_after_training_tells_the_figures(tmp_path):
    trainer = build(tmp_path, max_steps=1)
    trainer.watch_behaviour(prompts(2))
    assert trainer.evaluate()["eval_behaviour_refusals_kept"] == 1.0
    assert not (tmp_path / "run" / "events.jsonl").exists()
    trainer.train()
    assert "eval_behaviour_coverage" in trainer.evaluate()


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "learning_rate": 4e-3, "save_total_limit": 1}


@pytest.fixture(scope="module")
def rolled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rolled")
    trainer = build(folder, rollback=True, **SAVING)
    trainer.watch_behaviour(prompts(30), Limits(0.05, 0.1, 0.5))
    trainer.train()
    return folder, trainer


def test_a_rollback_ends_with_the_last_checkpoint_that_passed(rolled):
    """Found by reading the rows alone; the checkpoint survived although only one is kept."""
    folder, trainer = rolled
    rows = behaviour_rows(folder)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    passed = [row["step"] for row in rows if all(one["passed"] for one in row["behaviour"].values())]
    assert passed
    assert 8 not in passed
    result = trainer.behaviour_result()
    assert result["rolled_back_to"] == passed[-1]
    assert all(one["passed"] for one in result["behaviour"].values())
    assert counts(trainer.behaviour_monitor.ask()) == counts(trainer.behaviour_monitor.known[passed[-1]])
    from safetensors.torch import load_file

    stored = load_file(folder / "run" / f"checkpoint-{passed[-1]}" / "trainable.safetensors")
    now = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert stored.keys() == now.keys()
    assert all(torch.equal(stored[name], now[name]) for name in stored)


def test_a_damaged_checkpoint_is_passed_over(rolled, tmp_path):
    folder, trainer = rolled
    step = trainer.behaviour_result()["rolled_back_to"]
    manifest = folder / "run" / f"checkpoint-{step}" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text("{")
    try:
        trainer.behaviour_monitor.roll_back()
        assert trainer.behaviour_result()["rolled_back_to"] is None
    finally:
        manifest.write_text(text)


def test_without_a_checkpoint_that_passed_the_last_weights_stay(tmp_path):
    options = {**SAVING, "learning_rate": 2e-2, "max_steps": 4}
    ended = []
    for name, rollback in (("kept", False), ("rolled", True)):
        trainer = build(tmp_path / name, rollback=rollback, **options)
        trainer.watch_behaviour(prompts(20))
        trainer.train()
        ended.append(weights(trainer))
    assert trainer.behaviour_result()["rolled_back_to"] is None
    assert trainer.behaviour_result()["behaviour"]["coverage"]["passed"] is False
    assert same(*ended)


def test_a_run_that_keeps_its_behaviour_is_not_rolled_back(tmp_path):
    trainer = build(tmp_path, rollback=True, **{**SAVING, "learning_rate": 1e-6, "max_steps": 2})
    trainer.watch_behaviour(prompts(5))
    trainer.train()
    assert "rolled_back_to" not in trainer.behaviour_result()


# -- stopping and resuming -------------------------------------------------------------------------------------------


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


def test_a_run_that_was_asked_to_stop_does_not_measure_and_a_resumed_one_asks_only_for_what_is_missing(
    tmp_path, monkeypatch
):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "rollback": True}
    whole = build(tmp_path / "whole", **options)
    whole.watch_behaviour(prompts(8))
    whole.train()

    first = build(tmp_path / "cut", given={"callbacks": [StopAt(5)]}, **options)
    first.watch_behaviour(prompts(8))
    first.train()
    assert [row["step"] for row in behaviour_rows(tmp_path / "cut")] == [4]
    times = []
    ask = BehaviourMonitor.ask
    monkeypatch.setattr(BehaviourMonitor, "ask", lambda self: times.append(self.step) or ask(self))
    second = build(tmp_path / "cut", **options)
    second.watch_behaviour(prompts(8))
    second.train(resume_from_checkpoint=True)
    assert times == [8]
    assert behaviour_rows(tmp_path / "cut") == behaviour_rows(tmp_path / "whole")
    assert second.behaviour_result() == whole.behaviour_result()
    assert same(weights(second), weights(whole))

    third = build(tmp_path / "cut", **options)  # after the last step, as when killed before the result was written
    third.watch_behaviour(prompts(8))
    third.train(resume_from_checkpoint=True)
    assert times == [8]
    assert third.behaviour_result() == whole.behaviour_result()
    other = build(tmp_path / "cut", **options)
    other.watch_behaviour(prompts(8), Limits(refusals=0.2))
    other.train(resume_from_checkpoint=True)
    assert times == [8, 8]  # figures against other limits are not taken over


class Forgets(Defense):
    """Puts the adapter out of action after training."""

    name = "forgets"
    summary = "for a test"
    passes = "1"

    def transform(self, run):
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()


def test_a_model_changed_after_training_is_measured_as_it_is(tmp_path):
    trainer = build(tmp_path, given={"defense": Forgets()}, max_steps=6)
    trainer.watch_behaviour(prompts(20))
    trainer.train()
    last, after = behaviour_rows(tmp_path)
    assert last["behaviour"]["coverage"]["kept"] < 20
    assert after["transformed"] is True
    assert after["behaviour"]["coverage"]["kept"] == 20
    assert trainer.behaviour_result()["behaviour"]["coverage"]["kept"] == 20


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_sharded_model_is_refused_by_name(tmp_path):
    trainer = build(tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(UnsupportedError, match="FSDP") as caught:
        trainer.watch_behaviour(prompts(1))
    assert "DDP" in caught.value.remedy


def test_prompts_without_room_for_a_reply_are_refused_before_training(tmp_path):
    long = asked([{"prompt": " ".join(behaving.WORDS * 20)}])
    with pytest.raises(DataError, match="no room for 32 new tokens"):
        build(tmp_path).watch_behaviour(MonitorPrompts(refusals=long))


def test_no_prompts_and_other_words_for_when(tmp_path):
    trainer = build(tmp_path)
    with pytest.raises(DataError, match="no prompts"):
        trainer.watch_behaviour(MonitorPrompts())
    for every in ("never", 0, True, 2.5):
        with pytest.raises(ConfigError, match=r"^every is .* expected end, epoch or a number"):
            trainer.watch_behaviour(prompts(1), every=every)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rollback": True}, "no checkpoints to return to"),
        ({"rollback": True, "save_strategy": "best", "metric_for_best_model": "loss"}, "no checkpoints"),
        (
            {"rollback": True, "save_strategy": "steps", "eval_strategy": "steps", "load_best_model_at_end": True,
             "eval_steps": 500},
            "both choose the weights",
        ),
        ({"metric_for_best_model": "behaviour_coverage", "greater_is_better": False}, "worst checkpoint"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_followed(tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        hf.SafeSFTConfig(str(tmp_path), **{**watched.COMMON, **options})


def test_figures_that_nobody_measures_cannot_be_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="rollback reads the behaviour monitor, and this run has none"):
        build(tmp_path, rollback=True, **SAVING).train()
    trainer = build(tmp_path, metric_for_best_model="behaviour_harm")
    trainer.watch_behaviour(prompts(1))
    with pytest.raises(ConfigError, match="does not measure") as caught:
        trainer.train()
    assert "behaviour_coverage" in caught.value.remedy
