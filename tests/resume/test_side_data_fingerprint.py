"""A checkpoint is bound to the side data of its defense: harmful pairs, and the weights before alignment."""

from __future__ import annotations

import pytest
from tests import aligned, tiny
from tests.unit.trainers.building import build

from holdfast.core.errors import CheckpointError


@pytest.fixture
def adapters(tmp_path):
    return [aligned.adapter(tmp_path / f"adapter-{seed}", seed=seed) for seed in (11, 12)]


def asft(folder, model, unaligned, **options):
    given = {"model": model, "defense": "asft", "unaligned": unaligned}
    return build(folder, given=given, save_strategy="steps", save_steps=2, max_steps=4, **options)


def test_other_weights_before_alignment_are_refused(tmp_path, adapters):
    first, other = adapters
    trainer = asft(tmp_path, aligned.merged(first), first)
    trainer.train()
    with pytest.raises(CheckpointError, match="unaligned"):
        asft(tmp_path, aligned.merged(first), other).train(resume_from_checkpoint=True)
    asft(tmp_path, aligned.merged(first), first).train(resume_from_checkpoint=True)


def test_a_model_object_before_alignment_is_told_by_its_weights(tmp_path, adapters):
    first, other = adapters
    asft(tmp_path, aligned.merged(first), tiny.model()).train()
    with pytest.raises(CheckpointError, match="unaligned"):
        asft(tmp_path, aligned.merged(first), aligned.merged(other)).train(resume_from_checkpoint=True)
    asft(tmp_path, aligned.merged(first), tiny.model()).train(resume_from_checkpoint=True)


def test_a_folder_that_changes_while_training_is_what_it_was_at_the_start(tmp_path, adapters):
    first, other = adapters
    weights = first / "adapter_model.safetensors"
    model, before = aligned.merged(first), weights.read_bytes()
    trainer = asft(tmp_path, model, first)
    weights.write_bytes((other / weights.name).read_bytes())
    trainer.train()
    weights.write_bytes(before)
    asft(tmp_path, aligned.merged(first), first).train(resume_from_checkpoint=True)


def test_other_harmful_pairs_are_refused(tmp_path):
    def booster(seed):
        given = {"defense": "booster", "harmful_dataset": tiny.dataset(6, seed=seed, start="w3")}
        return build(tmp_path, given=given, stage="align", save_strategy="steps", save_steps=2, max_steps=4)

    booster(5).train()
    with pytest.raises(CheckpointError, match="harmful"):
        booster(6).train(resume_from_checkpoint=True)
    booster(5).train(resume_from_checkpoint=True)
