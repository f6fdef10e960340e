"""The reference's states of kl_token, kept in host memory."""

from __future__ import annotations

import pytest
import torch
from tests.oracle.test_fused_step import SOME_ACTIVE, close, trained

from holdfast.fused.body import EagerPasses
from holdfast.fused.packed_rows import encoded_rows, scored
from holdfast.training import fused_setup as reference_states
from holdfast.training.fused_setup import fits, with_adapter_off

KL = {"unit": "kl_token", "limit": SOME_ACTIVE, "optim": "sgd", "learning_rate": 0.05, "safety_batch_size": 4}


@pytest.fixture
def run(tmp_path):
    return trained(tmp_path, "fused", **KL)


def test_kept_states_are_those_of_a_pass(run, monkeypatch):
    monkeypatch.setattr(reference_states, "PASS_TOKENS", 40)  # several passes
    _, _, trainer = run
    passes, examples = EagerPasses(trainer.run.engine.joint.passes.body), trainer.safety["safety"].constraint_set
    kept = with_adapter_off(passes, examples, torch.device("cpu"))
    wanted = [examples[i] for i in (7, 0, 3)]
    rows = [encoded_rows(wanted)]
    expected = passes.states(rows, adapters=False)[scored(rows)[0].at]
    torch.testing.assert_close(kept(wanted), expected, rtol=1e-5, atol=1e-5)


def test_they_are_kept_where_every_row_comes_up_and_the_step_is_the_same(run, tmp_path, monkeypatch):
    watch, _, trainer = run
    assert trainer.run.engine.joint.kept is not None
    monkeypatch.setattr(reference_states, "LIMIT", 1)
    other, _, without = trained(tmp_path / "without", "fused", **KL)
    assert without.run.engine.joint.kept is None  # type: ignore[attr-defined]
    close(watch.side, other.side, 1e-5)
    few, _, rare = trained(tmp_path / "rare", "fused", **{**KL, "safety_batch_size": 2})
    assert rare.run.engine.joint.kept is None  # type: ignore[attr-defined]
    assert few.side


def test_other_units_keep_nothing(tmp_path):
    _, _, trainer = trained(tmp_path, "fused", **{**KL, "unit": "nll_token"})
    assert trainer.run.engine.joint.kept is None  # type: ignore[attr-defined]


def test_what_fits(run):
    _, _, trainer = run
    examples = trainer.safety["safety"].constraint_set
    tokens = sum(example.n_labels for example in examples)
    width = reference_states.LIMIT // tokens // 2
    assert fits(examples, width, torch.bfloat16)
    assert not fits(examples, width + 1, torch.bfloat16)
    assert fits([*examples, *examples], width, torch.bfloat16)  # a row is kept once
