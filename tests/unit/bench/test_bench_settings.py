"""What is measured, in which order, and what is refused."""

from __future__ import annotations

import pytest

from holdfast.core.errors import ConfigError
from holdfast_lab.bench.settings import BASELINE, PATHS, SWEPT_PATHS, Settings


def test_all_paths_with_and_without_checkpointing():
    cells = Settings(shapes=("tiny",)).cells("tiny")
    paths = [path for path in PATHS if path != "trl_best"]
    assert [(c.path, c.checkpointing) for c in cells] == [(p, on) for on in (True, False) for p in paths]
    assert {(c.batch, c.safety_batch, c.rank, c.steps, c.warm_up) for c in cells} == {(10, 10, 32, 25, 5)}
    assert cells[0].path == BASELINE


def test_fewer_paths_with_checkpointing():
    settings = Settings(shapes=("tiny",), paths=("trl_sft", "sft"), checkpointed_paths=("trl_sft",))
    cells = settings.cells("tiny")
    assert [(c.path, c.checkpointing) for c in cells] == [("trl_sft", True), ("trl_sft", False), ("sft", False)]


@pytest.mark.parametrize("sweep", ["batch", "length", "rank", "safety_batch"])
def test_a_sweep_varies_one_setting(sweep):
    settings = Settings(shapes=("tiny",), sweep=sweep, values=(7, 9), checkpointing=(True,))
    cells = settings.cells("tiny")
    assert [(c.path, getattr(c, sweep), c.value) for c in cells] == [(p, v, v) for v in (7, 9) for p in SWEPT_PATHS]
    others = {"batch": 10, "safety_batch": 10, "rank": 32, "length": None} | {sweep: 7}
    assert {name: getattr(cells[0], name) for name in others} == others
    assert len({c.group for c in cells}) == 2


def test_a_sweep_has_values_of_its_own():
    assert {c.rank for c in Settings(shapes=("tiny",), sweep="rank").cells("tiny")} == {4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"shapes": ()}, "no shape"),
        ({"shapes": ("huge",)}, "huge"),
        ({"task": "mnli"}, "mnli"),
        ({"paths": ("sft", "fast")}, "fast"),
        ({"checkpointed_paths": ("fast",)}, "--checkpointed-paths: unknown fast"),
        ({"target_modules": ("q_proj", "kproj")}, "--target-modules: unknown kproj"),
        ({"sweep": "width"}, "width"),
        ({"values": (1,)}, "--values without --sweep"),
        ({"sweep": "length", "values": (2,)}, "--values is 2, expected at least 3"),
        ({"steps": 0}, "--steps is 0"),
        ({"warm_up": -1}, "--warm-up is -1"),
        ({"rank": 0}, "--rank is 0"),
        ({"tau": 0.0}, "--tau is 0"),
        ({"tau": float("nan")}, "--tau is nan"),
    ],
)
def test_refusals(wrong, named):
    with pytest.raises(ConfigError, match=named):
        Settings(**({"shapes": ("tiny",)} | wrong))


def test_all_linear_layers_are_asked_for_alone():
    with pytest.raises(ConfigError, match="all-linear beside other names"):
        Settings(shapes=("tiny",), target_modules=("all-linear", "q_proj"))
