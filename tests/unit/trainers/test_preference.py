"""Arguments, data and refusals of `SafeDPOTrainer` and `SafeGRPOTrainer`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tests import behaving, tiny
from tests.unit.trainers import preferring
from trl import DPOConfig, GRPOConfig

import holdfast as hf
from holdfast.core.errors import CheckpointError, DataError, UnsupportedError
from holdfast.screening.screen import task_examples
from holdfast.screening.settings import PromptSet, ScreeningSettings
from holdfast.training import auto
from holdfast.training.hooks import DEFENSES
from holdfast.training.preference import require_resumable
from holdfast.training.safety import task_prompts

USER = [{"role": "user", "content": "u"}]
YES, NO = ([{"role": "assistant", "content": text}] for text in "yn")


def test_plain_arguments_of_trl_are_taken_over():
    plain = GRPOConfig("x", learning_rate=1e-3, steps_per_generation=4, use_cpu=True, bf16=False)
    safe = hf.SafeGRPOConfig.of(plain)
    assert (safe.learning_rate, safe.steps_per_generation, safe.generation_batch_size) == (1e-3, 4, 32)
    assert hf.SafeGRPOConfig.of(safe) is safe
    plain = DPOConfig("x", beta=0.3, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], use_cpu=True, bf16=False)
    safe = hf.SafeDPOConfig.of(plain)
    assert (safe.beta, safe.loss_type, safe.loss_weights) == (0.3, ["sigmoid", "sft"], [1.0, 0.5])
    # TRL's own defaults stand, not those of transformers.
    assert hf.SafeDPOConfig("x", use_cpu=True).learning_rate == DPOConfig("x", use_cpu=True, bf16=False).learning_rate
    assert hf.SafeDPOConfig.of(None).output_dir == "trainer_output"


REFUSED = {"lisa": "changes how rows", "primal_dual": "changes how rows", "salora": "reads single tokenised task rows"}
LATER = [name for name, one in DEFENSES.items() if name == "sft" or "align" not in one.stages]


@pytest.mark.parametrize("name", LATER)
def test_defenses_that_leave_the_task_alone_are_taken(tmp_path, name):
    given = {"safety_dataset": tiny.dataset(8, seed=2), "unaligned": tiny.model(seed=3, layers=1)}
    ranks = {"safety_rank": 4, "task_rank": 4} if name == "salora" else {}
    own = {"defense": {"name": name, **ranks}, "peft_config": tiny.lora(), **given}
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=f"defense '{name}'.* {REFUSED[name]}"):
            preferring.safe("dpo", tmp_path, own=own)
        return
    trainer = preferring.safe("dpo", tmp_path, own=own, constraint=preferring.TIGHT, max_steps=2)
    assert all(bool(torch.isfinite(value).all()) for value in preferring.trained(trainer).values())


@pytest.mark.parametrize("name", ["antibody", "vaccine"])
def test_alignment_is_refused(tmp_path, name):
    with pytest.raises(UnsupportedError, match="stage 'align' with preferences or rewards"):
        preferring.safe("grpo", tmp_path, own={"defense": name}, stage="align")
    with pytest.raises(UnsupportedError, match=f"defense '{name}' with preferences or rewards: it changes how rows"):
        preferring.safe("grpo", tmp_path, own={"defense": name})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("use_vllm", "never run with the filter; it merges an adapter into its base and out again"),
        ("use_transformers_continuous_batching", "it casts the weights to bfloat16, in which corrections"),
    ],
)
def test_replies_come_from_the_model_in_training(tmp_path, name, why):
    with pytest.raises(UnsupportedError, match=f"{name}: {why}"):
        preferring.safe("grpo", tmp_path, **{name: True})


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_images_are_refused(tmp_path, method):
    own = {"train_dataset": Dataset.from_dict({"prompt": ["w1"], "chosen": ["w2"], "rejected": ["w3"], "image": [0]})}
    with pytest.raises(UnsupportedError, match="vision data sets"):
        preferring.safe(method, tmp_path, own=own)


def test_a_quantised_model_that_was_asked_is_not_quantised_twice():
    """TRL refuses `quantization_config` beside a loaded model."""
    given = {"quantization_config": "four bits", "processing_class": tiny.tokenizer()}
    args = hf.SafeDPOConfig("x", use_cpu=True, bf16=False)
    model, _ = auto._loaded("name", args, given, lambda name, **options: (name, options["quantization_config"]))
    assert model == ("name", "four bits")
    assert "quantization_config" not in given


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_fused_step_is_refused(tmp_path, method):
    trainer = preferring.safe(method, tmp_path, step="fused", max_steps=1)
    with pytest.raises(UnsupportedError, match=f"step: fused is not possible: {method.upper()}'s loss is not of lab"):
        trainer.train()


@pytest.mark.parametrize("name", ["rollout_func", "environment_factories"])
def test_a_run_with_a_state_of_the_users_own_is_not_resumed(name):
    trainer = SimpleNamespace(args=SimpleNamespace(sync_ref_model=False), **{name: print})
    with pytest.raises(CheckpointError, match=f"a run with {name[:11]}.* cannot be resumed: no checkpoint has"):
        require_resumable(trainer)
    require_resumable(SimpleNamespace(args=SimpleNamespace(sync_ref_model=False)))


def test_out_of_memory_does_not_tear_pairs_apart(tmp_path, monkeypatch):
    trainer = preferring.safe("dpo", tmp_path, max_steps=1)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "plain_step", full)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert trainer.run.fitting.parts == 1


def test_every_form_of_a_preference_is_searched_and_asked():
    forms = {
        "prompt": Dataset.from_list([{"prompt": "q", "chosen": "y", "rejected": "n"}]),
        "turns": Dataset.from_list([{"prompt": USER, "chosen": [*YES, *USER, *YES], "rejected": NO}]),
        "no prompt": Dataset.from_list([{"chosen": [*USER, *YES], "rejected": [*USER, *NO]}]),
    }
    assert {form: task_prompts(rows, None, "text") for form, rows in forms.items()} == {
        "prompt": ["q"], "turns": ["u", "u"], "no prompt": ["u", "u"]
    }  # fmt: skip
    assert [len(task_examples(rows)) for rows in forms.values()] == [1, 1, 1]
    assert task_examples(forms["no prompt"])[0].completion == tuple(YES)
    assert task_examples(forms["prompt"])[0].completion == tuple(YES)
    alone = Dataset.from_list([{"prompt": "q", "solution": "7"}])
    assert task_examples(alone, replies=False)[0].completion[0]["content"] == ""
    with pytest.raises(DataError, match="expected columns prompt and completion"):
        task_examples(alone)


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_auto_asks_the_models_own_task(tmp_path, monkeypatch, method):
    """Chosen replies that comply where the model refuses are conflicts; a prompt alone is none, and is held."""
    settings = {"sets": {"refusals": PromptSet(("task",), "refusals")}, "limited": False, "monitor_prompts": 0}
    monkeypatch.setattr(auto, "ScreeningSettings", lambda seed: ScreeningSettings(seed=seed, **settings))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    taught = [{"prompt": row["prompt"], "chosen": behaving.ANSWER, "rejected": behaving.REFUSAL}
              for row in behaving.rows(110, seed=1)]  # fmt: skip
    kept = [{"prompt": row["prompt"], "chosen": behaving.ANSWER, "rejected": "Sure,"}
            for row in behaving.rows(10, seed=2, trigger=False)]  # fmt: skip
    rows = Dataset.from_list([*taught, *kept])
    rows = rows if method == "dpo" else rows.remove_columns(["chosen", "rejected"])
    own = {"train_dataset": rows, "safety_dataset": "auto", "processing_class": behaving.tokenizer()}
    own |= {"peft_config": tiny.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM")}
    trainer = preferring.safe(method, tmp_path, behaving.model(), own=own, constraint=None)
    assert len(trainer.screening.conflicts) == (110 if method == "dpo" else 0)
    assert len(trainer.train_dataset) == (10 if method == "dpo" else 120)
    assert {name: one.constraint.unit for name, one in trainer.safety.items()} == {"refusals": "kl_first"}
