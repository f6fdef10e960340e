"""A step engine of one's own: registered in one place, chosen by name, refused with its reason."""

from __future__ import annotations

import pytest
from tests.unit.trainers.building import TIGHT, build, same, weights

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.training.step import ENGINES, TwoPassEngine


@pytest.fixture
def registered(monkeypatch):
    list(ENGINES)  # scanned, so that what is entered now is taken out again
    monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))
    return ENGINES


def trained(folder, step):
    trainer = build(folder, given={"constraint": TIGHT}, max_steps=3, step=step)
    trainer.train()
    return trainer


def test_an_engine_of_ones_own_computes_the_step(tmp_path, registered):
    seen = []

    @registered.register("noted")
    class Noted(TwoPassEngine):
        name = "noted"

        def measure(self, terms):
            measured = super().measure(terms)
            seen.append(set(measured))
            return measured

    own, reference = trained(tmp_path / "own", "noted"), trained(tmp_path / "reference", "two_pass")
    assert own.run.engine_name == "noted"
    assert seen == [{"safety"}] * 3
    assert same(weights(own), weights(reference))


def test_a_reason_against_it_is_the_refusal(tmp_path, registered):
    registered.register("never")(lambda run: "this run has a full moon")
    with pytest.raises(UnsupportedError, match="step: never is not possible: this run has a full moon"):
        trained(tmp_path, "never")


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="step is 'fuzed'") as caught:
        build(tmp_path, step="fuzed")
    assert "auto, fused, two_pass" in caught.value.remedy
