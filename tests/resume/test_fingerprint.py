"""A checkpoint is bound to settings, data, tokenizer and base: a change is refused by name, a harmless one is not."""

from __future__ import annotations

import re
import shutil
from dataclasses import fields

import pytest
import torch
from tests import tiny
from tests.resume.worker import CONSTRAINT, build, rows_of, safety_rows, task_rows, weights

import holdfast as hf
from holdfast.constraint.filter_input import FilterOptions
from holdfast.core.errors import CheckpointError
from holdfast.training.fingerprint import argument_fingerprint, dataset_sha256
from holdfast.training.hooks import make_defense

SHORT = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def changed_rows(rows, at, **columns):
    return tiny.Dataset.from_list([{**row, **columns} if i == at else row for i, row in enumerate(rows)])


def base(change):
    model = tiny.model(layers=1)
    with torch.no_grad():
        change(model)
    return model


def other_template():
    made = tiny.tokenizer()
    made.chat_template = tiny.CHAT_TEMPLATE + " "
    return made


def scaled_lora():
    return tiny.lora(0.2, alpha_pattern={"q_proj": 4})


def one_more_token():
    made = tiny.tokenizer()
    made.add_tokens(["w99"])
    return made


def constraint(**changes):
    given = {"tau": CONSTRAINT.tau, "beta": CONSTRAINT.beta, "unit": "nll_token", **changes}
    return {"constraint": hf.ChanceConstraint(**given)}


def nudge(model):
    model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-6


MOVED = {"prompt": task_rows()[3]["prompt"] + task_rows()[3]["completion"].split()[0] + " "}
MOVED["completion"] = task_rows()[3]["completion"].split(maxsplit=1)[1]
THETA = "references.safety"  # the table's hash covers what it was measured on
SPLIT = {f"splits.safety.{kind}.{role}" for kind in ("ids", "sha256") for role in ("constraint", "monitor", "certify")}
OPTIONS = {f"defense.{field.name}" for field in fields(FilterOptions)}
# What changes -> (how, keys that must be named, keys that may be named besides)
REFUSED = {
    "tau": (lambda: constraint(tau=0.06), {"constraints.safety.tau"}, set()),
    "alpha": (lambda: constraint(alpha=0.06), {"constraints.safety.alpha"}, set()),
    "beta": (lambda: constraint(beta=21.0), {"constraints.safety.beta"}, set()),
    "unit": (lambda: constraint(unit="nll_sum"), {"constraints.safety.unit"}, set()),
    "majorizer": (
        lambda: constraint(majorizer="softplus", beta=100.0),
        {"constraints.safety.majorizer"}, {"constraints.safety.beta"},
    ),
    "learning rate": (lambda: {"args": {"learning_rate": 0.01}}, {"arguments.learning_rate"}, set()),
    "schedule": (lambda: {"args": {"lr_scheduler_type": "linear"}}, {"arguments.lr_scheduler_type"}, set()),
    "steps": (lambda: {"args": {"max_steps": 6}}, {"arguments.max_steps"}, set()),
    "epochs": (lambda: {"args": {"num_train_epochs": 9}}, {"arguments.num_train_epochs"}, set()),
    "accumulation": (
        lambda: {"args": {"gradient_accumulation_steps": 1}}, {"arguments.gradient_accumulation_steps"}, set(),
    ),
    "safety batch": (lambda: {"args": {"safety_batch_size": 5}}, {"arguments.safety_batch_size"}, set()),
    "seed": (
        lambda: {"args": {"seed": 7}}, {"arguments.seed"},
        {"splits.safety.seed", THETA, *SPLIT},
    ),
    "defense": (lambda: {"defense": "sft"}, {"defense.name"}, OPTIONS),
    "defense option": (lambda: {"defense": {"name": "holdfast", "rate": 0.5}}, {"defense.rate"}, set()),
    "task row": (lambda: {"train_dataset": changed_rows(task_rows(), 3, completion="w5 w6")}, {"task_data"}, set()),
    "task order": (lambda: {"train_dataset": tiny.Dataset.from_list(task_rows()[::-1])}, {"task_data"}, set()),
    "task mask": (lambda: {"train_dataset": changed_rows(task_rows(), 3, **MOVED)}, {"task_data"}, set()),
    "safety row": (lambda: {"safety_dataset": changed_rows(safety_rows(), 3, completion="w5 w6")}, {THETA}, SPLIT),
    "tokenizer": (lambda: {"processing_class": one_more_token()}, {"theta_0.tokenizer", THETA}, set()),
    "chat template": (lambda: {"processing_class": other_template()}, {"theta_0.template", THETA}, set()),
    "base weights": (lambda: {"model": base(nudge)}, {"theta_0.weights", THETA}, set()),
    "adapter scale": (
        lambda: {"peft_config": scaled_lora()},
        {"adapter.default.alpha_pattern.q_proj"}, {"adapter.default.alpha_pattern"},
    ),
    "adapter dropout": (lambda: {"peft_config": tiny.lora(0.1)}, {"adapter.default.lora_dropout"}, set()),
}  # fmt: skip


def same_but(folder, *, args=None, **changes):
    return build(folder, args={**SHORT, **(args or {})}, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of four steps with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trainer = same_but(folder)
    trainer.train()
    return folder, weights(trainer)


@pytest.fixture
def half(whole, tmp_path):
    """The same run as if it had died after step 2."""
    folder = shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-4")
    return folder


def named_keys(error: CheckpointError) -> set[str]:
    return set(re.findall(r"(?:^|; |: )([\w.-]+): stored ", error.what))


@pytest.mark.parametrize("change", REFUSED)
def test_a_change_is_refused_by_the_keys_that_differ(half, tmp_path, change):
    """In a run folder without reference losses, so that it is the checkpoint that refuses."""
    make, required, allowed = REFUSED[change]
    changes = make()
    args = {**changes.pop("args", {}), "run_dir": str(tmp_path / "elsewhere")}
    trainer = same_but(half, args=args, **changes)
    before = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    with pytest.raises(CheckpointError, match="belongs to another run") as caught:
        trainer.train(resume_from_checkpoint=True)
    found = named_keys(caught.value)
    assert required <= found <= required | allowed
    assert caught.value.exit_code == 6
    assert "checkpoint-2" in caught.value.what
    assert "new output_dir" in caught.value.remedy
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert not list(half.glob("quarantine-*"))  # it is whole; it only belongs elsewhere


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("tokenizer", "tokenizer"), ("chat template", "template"), ("base weights", "weights"),
        ("adapter dropout", "adapter"), ("safety row", "ids"), ("tau", "tau"), ("task row", "task_data"),
    ],
)  # fmt: skip
def test_in_the_run_folder_itself_the_first_refusal_names_the_key_too(half, change, key):
    """The reference losses and the split stored there refuse before the checkpoint is looked at."""
    with pytest.raises(CheckpointError, match=rf"\b{key}\b") as caught:
        same_but(half, **REFUSED[change][0]()).train(resume_from_checkpoint=True)
    assert caught.value.exit_code == 6
    assert str(half) in caught.value.what


def test_refusals_quote_no_example(half, tmp_path):
    secret = "w51 w52 w53"
    for role, rows in (("train_dataset", task_rows()), ("safety_dataset", safety_rows())):
        changes = {role: changed_rows(rows, 3, completion=secret)}
        with pytest.raises(CheckpointError) as caught:
            same_but(half, args={"run_dir": str(tmp_path / role)}, **changes).train(resume_from_checkpoint=True)
        for text in (secret, rows[3]["prompt"], rows[3]["completion"]):
            assert text not in str(caught.value)


def test_another_number_of_processes_is_refused(half, monkeypatch):
    trainer = same_but(half)
    monkeypatch.setattr("holdfast.training.checkpointing.world", lambda: 2)
    with pytest.raises(CheckpointError) as caught:
        trainer.train(resume_from_checkpoint=True)
    assert named_keys(caught.value) == {"processes"}


def test_a_checkpoint_given_by_path_is_compared_too(half, tmp_path):
    trainer = same_but(tmp_path / "new", args={"learning_rate": 0.01})
    with pytest.raises(CheckpointError) as caught:
        trainer.train(resume_from_checkpoint=str(half / "checkpoint-2"))
    assert named_keys(caught.value) == {"arguments.learning_rate"}


@pytest.mark.parametrize(
    "args",
    [
        {"logging_steps": 3}, {"save_steps": 1, "save_total_limit": 1}, {"report_to": []}, {"run_name": "another"},
        {"eval_strategy": "steps", "eval_steps": 2}, {"disable_tqdm": False, "log_level": "error"},
    ],
    ids=", ".join,
)  # fmt: skip
def test_harmless_changes_resume_to_the_same_adapter(half, whole, args):
    trainer = same_but(half, args=args)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(weights(trainer), whole[1])
    assert rows_of(half) == rows_of(whole[0])


def test_a_moved_run_folder_resumes(half, whole, tmp_path):
    moved = half.rename(tmp_path / "moved")
    trainer = same_but(moved)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(weights(trainer), whole[1])
    assert rows_of(moved) == rows_of(whole[0])


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# The hash of the task data


def test_the_hash_of_the_data_sees_every_number_and_every_boundary():
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    variants = [
        rows,
        rows[::-1],
        [{**rows[0], "labels": [-100, -100, 3]}, rows[1]],
        [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}],
        [{key: rows[0][key] + rows[1][key] for key in rows[0]}],
        [{**row, "seq_lengths": [len(row["input_ids"])]} for row in rows],
    ]
    found = [dataset_sha256(tiny.Dataset.from_list(variant)) for variant in variants]
    assert len(set(found)) == len(variants)


def test_the_hash_of_the_data_does_not_depend_on_how_it_is_stored(tmp_path):
    rows = [{"input_ids": [i, 2 * i, 7][: 1 + i % 3], "labels": [i, 2 * i, 7][: 1 + i % 3]} for i in range(50)]
    made = tiny.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "data", num_shards=3)
    doubled = tiny.Dataset.from_list(rows + rows)
    assert dataset_sha256(tiny.Dataset.load_from_disk(tmp_path / "data")) == dataset_sha256(made)
    assert dataset_sha256(doubled.select(range(50, 100))) == dataset_sha256(made)
    assert dataset_sha256(doubled.select([*range(30), *range(80, 100)])) == dataset_sha256(made)


def test_rollback_may_be_asked_for_when_a_run_is_resumed(tmp_path):
    def fingerprint(**changes):
        return argument_fingerprint(
            hf.SafeSFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changes)
        )

    assert fingerprint(rollback=True) == fingerprint()
    assert fingerprint(spikes="off") != fingerprint()
    assert fingerprint(loss_weights="tokens") == fingerprint()
    assert fingerprint(loss_weights="rows") != fingerprint()


def test_checkpointing_of_layers_stands_under_one_name(tmp_path):
    """transformers 5.23 has a second one; a run goes on after an upgrade."""
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "gradient_checkpointing": True}
    found = argument_fingerprint(hf.SafeSFTConfig(**given))
    assert {name: found[name] for name in found if "checkpointing" in name} == {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": None,
    }  # fmt: skip


def test_options_of_the_filter_that_are_off_are_not_in_the_fingerprint():
    """Checkpoints of versions that did not know them fit."""
    known = {"name", "space", "rate", "metric", "trust_region", "estimator", "decay"}
    assert set(make_defense("holdfast").describe()) == known
    strict = make_defense({"name": "holdfast", "anchor": True, "dual": 0.1, "reserve": 0.4, "value_decay": 0.0})
    assert set(strict.describe()) == known | {"anchor", "dual", "reserve", "value_decay"}
