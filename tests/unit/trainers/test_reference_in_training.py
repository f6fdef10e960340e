"""Reference losses inside a run: measured once at theta_0, stored, reused, and never taken for something else's."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from peft import LoraConfig
from tests import tiny
from tests.unit.trainers.building import SLACK, build, safety

import holdfast as hf
from holdfast.core.errors import CheckpointError, DataError, InfeasibleError
from holdfast.scoring.forward import Forward
from holdfast.scoring.reference import ReferenceTable


@pytest.fixture
def passes_made(monkeypatch):
    """How many examples each pass for losses saw, in order."""
    seen: list[int] = []
    inner = Forward.losses

    def spy(self, examples, first_k, shuffle=None):
        seen.extend([len(examples)] * (shuffle is None))  # the noise floor's passes are shuffled
        return inner(self, examples, first_k, shuffle)

    monkeypatch.setattr(Forward, "losses", spy)
    return seen


def test_measured_once_and_stored(tmp_path, passes_made):
    trainer = build(tmp_path)
    assert sum(passes_made) == 16  # constraint and monitor; certify stays closed
    table = ReferenceTable.load(trainer.run_dir / "reference")
    assert table.sha256 == trainer.safety["safety"].reference.sha256
    assert not {e.id for e in trainer.safety["safety"].split.certify} & set(table.ids)
    assert {"weights", "adapter", "tokenizer", "template", "max_length", "dtype", "data"} <= table.provenance.keys()
    cached = list((tmp_path / "cache" / "reference").glob("*.json"))
    assert len(cached) == 1
    passes_made.clear()
    trainer.train()
    assert passes_made == []


def test_reused_by_another_run(tmp_path, passes_made):
    first = build(tmp_path / "a", reference_cache=str(tmp_path / "shared"))
    passes_made.clear()
    second = build(tmp_path / "b", reference_cache=str(tmp_path / "shared"))
    assert sum(passes_made) == 16  # the spot check: all rows of roles this small
    assert (second.run_dir / "reference.safetensors").exists()
    assert second.safety["safety"].reference.sha256 == first.safety["safety"].reference.sha256
    assert torch.equal(first.safety["safety"].monitor_reference, second.safety["safety"].monitor_reference)


def test_measured_before_a_checkpoint_is_loaded(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    first = build(tmp_path, **options)
    expected = first.safety["safety"].constraint_reference
    first.train()
    for path in [*first.run_dir.glob("reference.*"), *(tmp_path / "cache" / "reference").iterdir()]:
        path.unlink()
    second = build(tmp_path, **{**options, "max_steps": 2})
    found = second.safety["safety"].constraint_reference
    assert torch.equal(found, expected)
    moved = first.degradations(role="constraint").abs().max()
    assert float(moved) > 1e-3, "the checkpoint's losses would have been others"


def other_tokenizer():
    made = tiny.tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    return made


def other_template():
    made = tiny.tokenizer()
    made.chat_template += " "
    return made


CHANGES = {
    "tokenizer": ({"processing_class": other_tokenizer}, {}, "tokenizer"),
    "template": ({"processing_class": other_template}, {}, "template"),
    "base": ({"model": lambda: tiny.model(layers=1, seed=1)}, {}, "weights"),
    "dtype": ({"model": lambda: tiny.model(layers=1, dtype=torch.bfloat16)}, {}, "dtype"),
    "max_length": ({}, {"max_length": 30}, "max_length"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_run_in_the_same_folder_is_refused(tmp_path, name):
    given, options, key = CHANGES[name]
    build(tmp_path)
    with pytest.raises(CheckpointError, match="measured on something else") as caught:
        build(tmp_path, given={k: make() for k, make in given.items()}, **options)
    assert f"{key}: stored" in caught.value.what
    assert caught.value.exit_code == 6
    for unchanged in {"tokenizer", "template", "max_length", "data"} - {key}:
        assert f"{unchanged}: stored" not in caught.value.what


def test_changed_safety_data_in_the_same_folder_is_refused(tmp_path):
    build(tmp_path)
    with pytest.raises(CheckpointError):
        build(tmp_path, given={"safety_dataset": safety(20, seed=9)})


def test_a_forged_table_is_caught_by_the_spot_check(tmp_path):
    """Right provenance, right hash, another model's losses."""
    victim = build(tmp_path / "victim")
    other = build(tmp_path / "other", given={"model": tiny.model(layers=1, seed=1)})
    genuine, wrong = victim.safety["safety"].reference, other.safety["safety"].reference
    assert genuine.ids == wrong.ids
    for place in (victim.run_dir / "reference", *(tmp_path / "victim/cache/reference").glob("*.json")):
        ReferenceTable(genuine.ids, wrong.losses, genuine.provenance).save(place.with_suffix(""))
    with pytest.raises(CheckpointError, match="do not belong to this model") as caught:
        build(tmp_path / "victim")
    assert "measured again" in caught.value.remedy


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_a_flipped_byte_is_refused(tmp_path, suffix):
    trainer = build(tmp_path)
    path = trainer.run_dir / f"reference.{suffix}"
    content = bytearray(path.read_bytes())
    at = len(content) - 3 if suffix == "safetensors" else content.index(b'"sha256": "') + 15
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        build(tmp_path)


def test_a_reference_that_is_not_finite_names_the_examples(tmp_path):
    model = tiny.model(layers=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[tiny.tokenizer().convert_tokens_to_ids("w0")] = float("nan")
    rows = [{**row, "prompt": row["prompt"].replace("w0", "w2")} for row in tiny.rows(19, seed=2)] + tiny.rows(
        1, seed=3
    )
    given = {"model": model, "safety_dataset": rows, "constraint": SLACK}
    with pytest.raises(DataError, match="not finite") as caught:
        build(tmp_path, given=given, safety_fractions=(1.0, 0.0, 0.0))
    assert caught.value.exit_code == 3
    assert "of 1 safety examples" in caught.value.what
    assert not (tmp_path / "run" / "reference.json").exists()


def test_the_noise_floor_is_printed_with_its_unit(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="holdfast"):
        trainer = build(tmp_path, given={"constraint": hf.ChanceConstraint(unit="nll_sum")})
    assert "noise floor at theta_0" in caplog.text
    assert "unit nll_sum" in caplog.text
    assert "12 constraint, 4 monitor, 4 certify" in caplog.text
    assert trainer.safety["safety"].noise_floor < 1e-5
    assert json.loads((trainer.run_dir / "reference.json").read_text())["provenance"]["dtype"] == "float32"


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 0.0, 1e-6), (torch.bfloat16, 1e-7, 0.1)])
def test_a_fresh_adapter_does_not_hide_what_rounding_does(tmp_path, dtype, least, most):
    """With B = 0 a KL is zero to the last bit, in bfloat16 as well; with the first step it is not."""
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    given = {"model": tiny.model(dtype=dtype), "peft_config": adapter}
    trainer = build(tmp_path, given={**given, "constraint": hf.ChanceConstraint(unit="kl_token")})
    one, drawn = trainer.safety["safety"], torch.get_rng_state()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert least <= one.noise_floor <= most
    forward = trainer.run.forward.resized(trainer.run.side_rows)
    at_theta_0 = forward.degradations(one.constraint_set, one.constraint_reference, one.constraint)
    assert not at_theta_0.any()
    with trainer.run.theta_0.nudged():
        assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert torch.equal(drawn, torch.get_rng_state())


def test_tau_inside_the_noise_is_refused_unless_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.training.safety.noise_floor", lambda *_: 0.021)
    with pytest.raises(InfeasibleError, match="inside the numerical noise") as caught:
        build(tmp_path, given={"constraint": hf.ChanceConstraint(tau=0.1, unit="nll_token")})
    assert caught.value.exit_code == 4
    assert "tau >= 0.105" in caught.value.remedy
    build(tmp_path, given={"constraint": hf.ChanceConstraint(tau=0.1, allow_tau_below_noise=True, unit="nll_token")})
    monkeypatch.setattr("holdfast.training.safety.noise_floor", lambda *_: 0.019)
    build(tmp_path, given={"constraint": hf.ChanceConstraint(tau=0.1, unit="nll_token")})
