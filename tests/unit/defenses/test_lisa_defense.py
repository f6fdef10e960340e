"""Lisa: settings, the safe pairs it uses, what it logs, resuming, and the batches it takes from other loaders."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from tests import tiny
from tests.unit.trainers.building import build, same, weights

import holdfast as hf
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.training.hooks import make_defense
from holdfast_lab.defenses.lisa import Lisa, guide_rows

SHORT = {"name": "lisa", "align_steps": 2, "finetune_steps": 3, "rho": 0.5}


def trained(folder, defense=SHORT, *, given=None, **options):
    trainer = build(folder, given={"defense": defense, **(given or {})}, **options)
    seen = []
    compute_loss = trainer.compute_loss

    def noted(model, inputs, *args, **kwargs):
        seen.append(inputs["input_ids"].clone())
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = noted
    trainer.train()
    return trainer, seen


def test_the_authors_script_and_the_paper():
    assert make_defense("lisa").config == Lisa.Config(
        align_steps=100, finetune_steps=900, rho=1.0, guide=10000, warmup_share=0.1
    )
    assert make_defense({"name": "lisa", "preset": "paper"}).config == Lisa.Config(rho=0.01)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"align_steps": -1}, "align_steps is -1"),
        ({"finetune_steps": -2}, "finetune_steps is -2"),
        ({"align_steps": 0, "finetune_steps": 0}, "both 0"),
        ({"rho": -0.1}, "rho is -0.1"),
        ({"rho": float("nan")}, "rho is nan"),
        ({"rho": float("inf")}, "rho is inf"),
        ({"guide": 0}, "guide is 0"),
        ({"warmup_share": 1.5}, "warmup_share is 1.5"),
        ({"warmup_share": -0.1}, "warmup_share is -0.1"),
    ],
    ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "",
)
def test_settings_out_of_range_are_refused(options, what):
    with pytest.raises(ConfigError) as caught:
        make_defense({"name": "lisa", **options})
    assert what in caught.value.what
    assert caught.value.remedy


def test_safe_pairs_are_needed(tmp_path):
    with pytest.raises(ConfigError, match="needs a safety set"):
        build(tmp_path, given={"defense": "lisa", "safety_dataset": None, "constraint": None})


def test_trainable_weights_in_bfloat16_are_refused_only_with_a_proximal_term(tmp_path):
    given = {"model": tiny.model(layers=1, dtype=torch.bfloat16), "peft_config": None}
    with pytest.raises(UnsupportedError, match="bfloat16"):
        build(tmp_path / "a", given={**given, "defense": "lisa"})
    build(tmp_path / "b", given={**given, "defense": {"name": "lisa", "rho": 0.0}})


def tokens(rows: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(x for x in row if x != 0) for row in rows.tolist()}


@pytest.fixture(scope="module")
def twelve_steps(tmp_path_factory):
    """Phases of 2 and 3 steps, 2 rows a step, 12 safe pairs in two sets."""
    sets = {"one": tiny.dataset(10, seed=2), "two": tiny.dataset(10, seed=9, start="w2")}
    given = {"safety_dataset": sets, "constraint": hf.ChanceConstraint(tau=1e6, unit="nll_token")}
    return trained(tmp_path_factory.mktemp("lisa"), given=given, max_steps=12, learning_rate=0.05)


def test_rows_name_the_phase_and_the_distance(twelve_steps):
    trainer, _ = twelve_steps
    rows = read(trainer.run_dir / "events.jsonl")
    assert "".join(row["phase"][0] for row in rows) == "aafffaafffaa"
    assert [t for t, row in enumerate(rows) if row["distance"] == 0] == [0, 2, 5, 7, 10]
    for t, row in enumerate(rows):
        assert row["proximal_loss"] == pytest.approx(0.25 * row["distance"] ** 2 if t > 1.2 else 0.0)
    assert any("safety/distance" in entry for entry in trainer.state.log_history)


def test_alignment_steps_see_constraint_pairs_alone_and_never_the_task(twelve_steps):
    trainer, seen = twelve_steps
    constraint = {e.input_ids for e in trainer.run.data.safe}
    task = {tuple(row["input_ids"]) for row in trainer.train_dataset}
    for t, rows in enumerate(seen):
        assert tokens(rows) <= (constraint if t % 5 < 2 else task)
    assert not constraint & {e.input_ids for one in trainer.safety.values() for e in one.monitor_set}


def test_a_pass_over_all_safe_pairs_goes_on_in_the_next_alignment_phase(twelve_steps):
    """3 phases of 2 steps of 2 rows see each of the 12 pairs of both sets once."""
    trainer, seen = twelve_steps
    drawn = [row for t, rows in enumerate(seen) if t % 5 < 2 for row in sorted(tokens(rows))]
    assert sorted(drawn) == sorted(e.input_ids for e in trainer.run.data.safe)
    assert len(drawn) == 12


def test_the_proximal_term_waits_for_its_share_of_the_steps(tmp_path):
    """warmup_share 0.5 of 8 steps: active from t = 5, which begins a phase, so first felt at t = 6."""
    trainer, _ = trained(tmp_path, {**SHORT, "warmup_share": 0.5}, max_steps=8, learning_rate=0.05)
    rows = read(trainer.run_dir / "events.jsonl")
    assert [row["proximal_loss"] > 0 for row in rows] == [False] * 6 + [True, False]
    assert rows[4]["distance"] > 0


@pytest.mark.parametrize("most", [13, 12, 4])
def test_guide_caps_the_safe_pairs_and_the_seed_chooses_them(caplog, most):
    pairs = [object() for _ in range(12)]

    def chosen(seed):
        return guide_rows(
            SimpleNamespace(data=SimpleNamespace(safe=pairs), args=SimpleNamespace(stream_seed=seed)), most
        )

    with caplog.at_level(logging.WARNING, logger="holdfast_lab.defenses.lisa"):
        first = chosen(1)
    assert len(set(first)) == len(first) == min(most, 12)
    assert set(first) <= set(pairs)
    assert chosen(1) == first
    assert (chosen(2) == first) == (most >= 12)
    announced = ["lisa: guide=13, but there are 12 safe pairs; all of them are used"] if most == 13 else []
    assert [r.getMessage() for r in caplog.records][:1] == announced


def test_alignment_uses_the_chosen_pairs_alone(tmp_path):
    only_align = {"name": "lisa", "align_steps": 4, "finetune_steps": 0, "rho": 0.0, "guide": 4}
    _, seen = trained(tmp_path, only_align, max_steps=4)
    assert len(set().union(*map(tokens, seen))) == 4


def test_switched_off_it_is_plain_sft_bit_for_bit_and_uses_no_safe_pair(tmp_path, caplog):
    given = {"peft_config": tiny.lora(0.2)}
    off, seen = trained(tmp_path / "off", {"name": "lisa", **Lisa.off}, given=given, max_steps=4)
    plain, expected = trained(tmp_path / "sft", "sft", given=given, max_steps=4)
    assert same(weights(off), weights(plain))
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    assert off.defense.state_dict() == {"anchor": None}
    assert "safe pairs" not in caplog.text


def test_resumed_inside_a_phase_it_is_the_uninterrupted_run(tmp_path):
    stop = 3
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": stop, "gradient_accumulation_steps": 2}
    given = {"peft_config": tiny.lora(0.2)}
    whole, _ = trained(tmp_path, given=given, **options)
    resumed = build(tmp_path, given={"defense": SHORT, **given}, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{stop}"))
    assert same(weights(whole), weights(resumed))
    assert [row["distance"] for row in read(resumed.run_dir / "events.jsonl")][stop] > 0


def test_two_micro_batches_are_one_of_twice_the_size(tmp_path):
    found = []
    for size, accumulation in ((4, 1), (2, 2)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        trainer, _ = trained(tmp_path / str(size), max_steps=6, optim="sgd", learning_rate=0.1, **options)
        found.append(weights(trainer))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)


def test_a_model_that_divides_its_loss_itself(tmp_path):
    """Without a token count the Trainer divides by the micro-batches; guide rows must follow the same rule."""
    only_align = {"name": "lisa", "align_steps": 1, "finetune_steps": 0, "rho": 0.0}
    options = {"max_steps": 1, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    losses = []
    for own in (False, True):
        trainer = build(tmp_path / str(own), given={"defense": only_align}, **options)
        trainer.model_accepts_loss_kwargs = not own
        trainer.train()
        losses.append(read(trainer.run_dir / "events.jsonl")[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.1)  # the mean of two means instead of one mean


def test_guide_rows_stand_beside_packed_task_rows(tmp_path):
    """Packed rows have positions instead of padding; guide rows are ordinary padded rows."""
    options = {"packing": True, "max_length": 64, "max_steps": 7, "learning_rate": 0.05}
    trainer, seen = trained(tmp_path, given={"train_dataset": tiny.dataset(60, seed=1, start="w1")}, **options)
    assert all(tokens(rows) <= {e.input_ids for e in trainer.run.data.safe} for t, rows in enumerate(seen) if t % 5 < 2)
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())
