"""SafeGrad and the one-direction filter on vectors made by hand; their settings and refusals; resuming."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests import tiny
from tests.unit.constraint.literal import adapted
from tests.unit.trainers.building import build, same, weights

from holdfast.constraint.gradients import ParameterSpace
from holdfast.core.errors import ConfigError, NumericalError, UnsupportedError
from holdfast.core.event_log import read
from holdfast.training.hooks import make_defense
from holdfast_lab.defenses import salora_gradproj
from holdfast_lab.defenses.safegrad import SafeGrad
from holdfast_lab.defenses.salora_gradproj import SaLoRAGradientProjection, safety_direction


class Made:
    """A run with two parameters, a task gradient and a safe gradient."""

    def __init__(self, task: list[list[float]], safe: list[list[float]]) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(len(g), dtype=torch.float64)) for g in task]
        for p, g in zip(self.params, task, strict=True):
            p.grad = torch.tensor(g, dtype=torch.float64)
        self.safe_gradient = [torch.tensor(g, dtype=torch.float64) for g in safe]
        self.args = SimpleNamespace(stream_seed=0)
        self.safe = [SimpleNamespace(n_labels=1)] * 4
        self.data = self.engine = self
        self.theta_0 = SimpleNamespace(active=None)
        self.progress = SimpleNamespace(step=0)

    def space(self) -> ParameterSpace:
        return ParameterSpace(self.params)

    def draw(self, rows, name):
        return [0, 1]

    def side_gradient(self, rows, loss):
        return torch.full((len(rows),), 0.5, dtype=torch.float64), [g.clone() for g in self.safe_gradient]

    def gradient(self) -> list[float]:
        return torch.cat([p.grad for p in self.params]).tolist()  # type: ignore[misc]


def safegrad(made: Made, **options) -> tuple[list[float], dict]:
    defense = SafeGrad(SafeGrad.Config(**options))
    defense.attach(made)
    defense.on_gradient(made)
    return made.gradient(), defense.row()


def test_no_conflict_adds_the_safe_gradient():
    found, row = safegrad(Made([[1.0, 2.0], [3.0]], [[2.0, 0.0], [1.0]]), rho=0.5)
    assert found == pytest.approx([2.0, 2.0, 3.5])
    assert row == {"kl": 1.0, "coefficient": 0.0, "cosine": pytest.approx(5 / (14 * 5) ** 0.5)}


def test_a_conflict_without_rho_leaves_an_orthogonal_shorter_gradient():
    found, row = safegrad(Made([[1.0, 2.0], [3.0]], [[-2.0, 0.0], [-1.0]]), rho=0.0)
    assert found == pytest.approx([1 - 2, 2, 3 - 1])
    assert sum(a * b for a, b in zip(found, [-2, 0, -1], strict=True)) == pytest.approx(0, abs=1e-12)
    assert sum(x * x for x in found) < 14
    assert row["coefficient"] == pytest.approx(-1.0)


def test_rho_comes_after_the_projection():
    found, _ = safegrad(Made([[1.0, 2.0], [3.0]], [[-2.0, 0.0], [-1.0]]), rho=1.0)
    assert found == pytest.approx([1 - 2 - 2, 2, 3 - 1 - 1])
    found, _ = safegrad(Made([[1.0, 2.0], [3.0]], [[-2.0, 0.0], [-1.0]]), rho=1.0, project=False)
    assert found == pytest.approx([1 - 2, 2, 3 - 1])


def test_one_inner_product_for_all_tensors():
    """The first tensor alone is in conflict; together they are not."""
    found, row = safegrad(Made([[-1.0, 0.0], [3.0]], [[1.0, 0.0], [1.0]]), rho=0.0)
    assert found == [-1.0, 0.0, 3.0]
    assert row["coefficient"] == 0.0


def test_a_safe_gradient_of_almost_zero_is_not_divided_by():
    found, row = safegrad(Made([[1.0, 2.0], [3.0]], [[-1e-5, 0.0], [0.0]]), rho=0.0)
    assert found == [1.0, 2.0, 3.0]
    assert row["coefficient"] == 0.0


def test_a_large_coefficient_is_not_cut():
    """What is taken away is never longer than the task gradient."""
    found, row = safegrad(Made([[1.0, 2.0], [3.0]], [[-1e-3, 0.0], [0.0]]), rho=0.0)
    assert row["coefficient"] == pytest.approx(-1e3)
    assert found == pytest.approx([0.0, 2.0, 3.0])


def test_the_guide_is_a_fixed_choice_over_all_safety_sets(tmp_path):
    sets = {"first": tiny.rows(20, seed=2), "second": tiny.rows(20, seed=3, start="w2")}
    trainer = build(tmp_path, given={"safety_dataset": sets, "defense": {"name": "safegrad", "guide": 8}})
    guide, all_rows = trainer.defense.guide(trainer.run), trainer.run.data.safe  # type: ignore[attr-defined]
    assert len(all_rows) == 24
    assert len({id(row) for row in guide}) == 8
    assert [row.input_ids for row in guide] == [row.input_ids for row in trainer.defense.guide(trainer.run)]  # type: ignore[attr-defined]
    firsts = {row.input_ids for row in all_rows[:12]}
    assert 0 < sum(row.input_ids in firsts for row in guide) < 8
    assert SafeGrad(SafeGrad.Config(guide=None)).guide(trainer.run) == all_rows
    assert len(SafeGrad(SafeGrad.Config(guide=100)).guide(trainer.run)) == 24


def filtered(made: Made, **options) -> tuple[list[float], dict]:
    defense = SaLoRAGradientProjection(SaLoRAGradientProjection.Config(**options))
    defense.on_gradient(made)
    return made.gradient(), defense.row()


def test_the_direction_has_one_norm_and_both_signs_are_blocked():
    found, row = filtered(Made([[1.0, 2.0], [3.0]], [[30.0, 0.0], [40.0]]))  # u = (0.6, 0, 0.8), <g, u> = 3
    assert found == pytest.approx([1 - 1.8, 2, 3 - 2.4])
    assert row == {"along": pytest.approx(3.0), "cosine": pytest.approx(3 / 14**0.5)}
    opposite, _ = filtered(Made([[1.0, 2.0], [3.0]], [[-30.0, 0.0], [-40.0]]))
    assert opposite == pytest.approx(found)


def test_the_direction_is_found_once():
    defense = SaLoRAGradientProjection(SaLoRAGradientProjection.Config())
    made = Made([[1.0, 2.0], [3.0]], [[1.0, 0.0], [0.0]])
    defense.on_gradient(made)
    made.safe_gradient[0][:] = torch.tensor([0.0, 1.0])
    defense.on_gradient(made)
    assert made.gradient() == [0.0, 2.0, 3.0]


@pytest.mark.parametrize("size", [0.0, float("nan"), float("inf")], ids=["zero", "nan", "inf"])
def test_a_safe_gradient_without_a_direction_is_refused(size):
    with pytest.raises(NumericalError, match="salora_gradproj: the gradient of 4 safe pairs has norm") as caught:
        filtered(Made([[1.0], [2.0]], [[size], [0.0]]))
    assert "target_modules" in caught.value.remedy


def test_rows_that_fill_up_the_shares_of_the_processes_count_nothing(tmp_path, monkeypatch):
    trainer = build(tmp_path, given={"defense": "salora_gradproj"})
    trainer.create_optimizer()
    rows = trainer.run.data.safe[:5]
    passed: list[int] = []
    own = trainer.run.engine.side_gradient
    trainer.run.engine.side_gradient = lambda rows, loss: (passed.append(len(rows)), own(rows, loss))[1]
    alone = safety_direction(trainer.run, rows)
    monkeypatch.setattr(salora_gradproj, "world", lambda: 4)
    filled = safety_direction(trainer.run, rows)
    assert passed == [5, 8]
    for a, b in zip(alone, filled, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_at_most_the_rows_asked_for_make_the_direction(tmp_path):
    counts = []
    for rows in (3, 100, None):
        trainer = build(tmp_path / str(rows), given={"defense": {"name": "salora_gradproj", "rows": rows}}, max_steps=1)
        own = trainer.run.engine.side_gradient
        trainer.run.engine.side_gradient = lambda rows, loss, own=own: (counts.append(len(rows)), own(rows, loss))[1]  # type: ignore[misc]
        trainer.train()
    assert counts == [3, 12, 12]


@pytest.mark.parametrize("name", ["safegrad", "salora_gradproj"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, name):
    """A continued adapter: theta_0 is known to a resumed run only by what was kept."""
    options = {"max_steps": 4, "learning_rate": 5e-2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    given = {"defense": name, "peft_config": None}

    def trainer(folder):
        return build(folder, given={**given, "model": adapted(trained=0.2)}, **options)

    whole = trainer(tmp_path / "a")
    whole.train()
    again = trainer(tmp_path / "a")
    again.train(resume_from_checkpoint=str(whole.store.root / "checkpoint-2"))
    assert same(weights(whole), weights(again))
    rows = read(again.run_dir / "events.jsonl")
    assert len({row["cosine"] for row in rows}) == 4


@pytest.mark.parametrize(
    ("choice", "what", "remedy"),
    [
        ({"name": "safegrad", "rho": -1.0}, "rho is -1.0", "the authors use 1"),
        ({"name": "safegrad", "rho": float("nan")}, "rho is nan", "the authors use 1"),
        ({"name": "safegrad", "guide": 0}, "guide is 0", "100"),
        ({"name": "safegrad", "positions": "prompt"}, "positions is 'prompt'", "completion or all"),
        ({"name": "salora_gradproj", "strength": 1.5}, "strength is 1.5", "the paper uses 1"),
        ({"name": "salora_gradproj", "strength": -0.1}, "strength is -0.1", "the paper uses 1"),
        ({"name": "salora_gradproj", "rows": 0}, "rows is 0", "128"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_settings_out_of_range_are_refused(choice, what, remedy):
    with pytest.raises(ConfigError) as caught:
        make_defense(choice)
    assert what in caught.value.what
    assert remedy in caught.value.remedy


def test_the_paper_s_constants():
    assert make_defense({"name": "safegrad", "preset": "paper"}).config == SafeGrad.Config(rho=1.0, guide=None)
    assert SafeGrad.Config().guide == 100
    assert make_defense({"name": "salora_gradproj", "preset": "paper"}).config.strength == 1.0


@pytest.mark.parametrize("name", ["safegrad", "salora_gradproj"])
def test_trainable_weights_in_bfloat16_are_refused(tmp_path, name):
    given = {"defense": name, "model": tiny.model(layers=1, dtype=torch.bfloat16), "peft_config": None}
    with pytest.raises(UnsupportedError, match="trainable parameters in bfloat16"):
        build(tmp_path, given=given)


@pytest.mark.parametrize("name", ["safegrad", "salora_gradproj"])
def test_a_safety_set_is_needed(tmp_path, name):
    with pytest.raises(ConfigError, match="needs a safety set"):
        build(tmp_path, given={"defense": name, "safety_dataset": None, "constraint": None})
