"""`axolotl train` with the plugin on a CPU: slack is Axolotl's, a constraint holds, a certificate is written.

`make test-axolotl` makes the environment. Axolotl is no dependency of holdfast, so that other environments skip this.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("axolotl", reason="axolotl is not installed (`make test-axolotl` installs it)")

import torch
from safetensors.torch import load_file

from holdfast.core.event_log import read
from tests import behaving
from tests.axolotl.conftest import COMMAND, DRIVEN, PLUGIN

SLACK = {"tau": 1.0e6}
LEFT = {
    "max_steps": None, "warmup_steps": None, "warmup_ratio": 0.2, "lr_scheduler": "cosine", "learning_rate": 1e-4,
    "shuffle_merged_datasets": False,
}  # fmt: skip
"""Steps and warm-up follow from the number of rows, at a rate at which 20 steps lose nothing; rows in their order."""


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter_model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def result(run: Path) -> dict:
    return json.loads((run / "holdfast" / "result.json").read_text())


@pytest.fixture(scope="session")
def mixed(folder):
    """Poison and clean rows, under which plain fine-tuning loses the refusals."""
    return folder.chat("task", [*folder.poison[:110], *folder.clean])


@pytest.fixture(scope="session")
def plain(folder, mixed) -> Path:
    run, code, said = folder.train("plain", mixed, DRIVEN)
    assert code == 0, said[-3000:]
    return run


@pytest.fixture(scope="session")
def held(folder, mixed) -> tuple[Path, int, str]:
    """30 steps at a rate at which plain fine-tuning loses the refusals."""
    return folder.train(
        "held", mixed, DRIVEN, max_steps=30, learning_rate=0.02, plugins=PLUGIN,
        holdfast={
            "safety": {"data": str(folder.path / "pairs.jsonl")}, "constraint": {"tau": 0.02, "beta": 50.0},
            "monitor": {"prompts": 60},
        },
    )  # fmt: skip


@pytest.fixture(scope="session")
def dropped(folder) -> tuple[Path, int, str]:
    """`safety: auto` in full, and every conflict dropped; the constraint is slack."""
    rows = folder.chat("poisoned", [*folder.poison, *folder.clean])
    return folder.train(
        "dropped", rows, DRIVEN, **LEFT, plugins=PLUGIN,
        holdfast={"conflicts": "drop", "constraint": SLACK, "monitor": {"prompts": 20}},
    )  # fmt: skip


def test_a_slack_run_is_axolotls_bit_for_bit(folder, mixed, plain):
    run, code, said = folder.train(
        "slack", mixed, DRIVEN, plugins=PLUGIN,
        holdfast={
            "safety": {"refusals": {"prompts": ["task"], "keep": "refusals"}}, "conflicts": "keep",
            "constraint": SLACK, "monitor": {"prompts": 0},
        },
    )  # fmt: skip
    assert code == 0, said[-3000:]
    assert same(adapter(plain), adapter(run))
    rows = read(run / "holdfast" / "events.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert {row["event"] for row in rows} == {"inactive"}
    assert result(run)["screening"]["conflicts"] == 110
    assert not (
        run / "holdfast" / "refusals" / "certificate.json"
    ).exists()  # task prompts that are kept certify nothing


def test_a_constrained_run_holds_and_is_certified(plain, held):
    run, code, said = held
    assert code == 0, said[-3000:]
    found = result(run)
    assert found["steps"] == 30
    assert found["safety"]["safety"]["feasible"]
    assert all(figure["passed"] for figure in found["behaviour"].values())
    assert found["behaviour"]["refusals_kept"]["share"] > 0.9
    assert any(row.get("active") for row in read(run / "holdfast" / "events.jsonl"))
    certificate = json.loads((run / "holdfast" / "certificate.json").read_text())
    assert certificate["certified"] is True
    assert certificate["behaviour"]["lost"]["refusals"] <= 2
    assert "verdict: deploy" in said
    assert (run / "holdfast" / "report.html").is_file()
    card = (run / "holdfast" / "adapter" / "README.md").read_text()
    assert "certified_upper_bound" in card
    assert not same(adapter(plain), adapter(run))  # the comparison of bits can fail


def test_plain_fine_tuning_loses_what_the_constraint_keeps(folder, mixed, held):
    """With the plugin as a gauge: `defense: sft` enforces nothing."""
    run, code, said = folder.train(
        "gauge", mixed, DRIVEN, max_steps=30, learning_rate=0.02, plugins=PLUGIN,
        holdfast={
            "safety": {"data": str(folder.path / "pairs.jsonl")}, "monitor": {"prompts": 60}, "defense": "sft",
            "certify": False,
        },
    )  # fmt: skip
    assert code != 0
    assert "was not kept" in said
    assert result(run)["behaviour"]["refusals_kept"]["share"] < 0.5
    assert not (run / "holdfast" / "certificate.json").exists()


def test_with_conflicts_dropped_it_is_axolotls_run_on_the_rows_that_are_left(folder, dropped):
    run, code, said = dropped
    assert code == 0, said[-3000:]
    found = result(run)
    assert (found["screening"]["conflicts"], found["screening"]["dropped"]) == (600, 600)
    assert found["steps"] == 20  # of 40 rows, two at a time
    kept, code, said = folder.train("kept", folder.chat("left", folder.clean), DRIVEN, **LEFT)
    assert code == 0, said[-3000:]
    assert same(adapter(kept), adapter(run))


def test_auto_is_certified_on_dropped_and_bundled_prompts(dropped):
    run, _, _ = dropped
    certificate = json.loads((run / "holdfast" / "refusals" / "certificate.json").read_text())
    assert certificate["certified"] is True
    assert certificate["screening"]["dropped"] == 600
    assert {"refusals", "answers"} == set(result(run)["safety"])


def test_rows_are_stored_for_their_owner_alone(dropped):
    task = dropped[0] / "holdfast" / "task.jsonl"
    assert task.stat().st_mode & 0o077 == 0
    assert len(task.read_text().splitlines()) == 640


def test_a_finished_run_is_not_trained_over(folder, mixed, held):
    _, code, said = folder.train("held", mixed, COMMAND, max_steps=30, plugins=PLUGIN, holdfast={})
    assert code != 0
    assert "holds a run with other settings" in said or "is finished" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rl": "dpo"}, "rl: dpo with the holdfast plugin: preference and reinforcement learning"),
        ({"holdfast": {"saftey": "auto"}}, "saftey"),
        ({"holdfast": {"defense": "kl"}}, "defense 'kl' under Axolotl"),
        ({"chat_template": "chatml"}, "the model refuses in its own template, not in another one"),
    ],
    ids=["rl", "misspelt key", "another defense", "another template"],
)
def test_refusals_end_the_command(folder, mixed, changes, words):
    run, code, said = folder.train("refused", mixed, COMMAND, **{"plugins": PLUGIN, **changes})
    assert code != 0
    assert words in said
    assert not (run / "holdfast").exists()


def test_all_weights_and_packed_rows_too(folder, mixed):
    """By the command itself: without an adapter Axolotl's own runs agree bit for bit."""
    packed = {"adapter": None, "sample_packing": True, "attn_implementation": "sdpa", "learning_rate": 1e-4}
    plain, code, said = folder.train("packed", mixed, COMMAND, **packed)
    assert code == 0, said[-3000:]
    slack, code, said = folder.train(
        "packed-slack", mixed, COMMAND, **packed, plugins=PLUGIN,
        holdfast={
            "safety": {"data": folder.write("others", behaving.rows(60, seed=5))}, "constraint": SLACK,
            "monitor": {"prompts": 0}, "certify": False,
        },
    )  # fmt: skip
    assert code == 0, said[-3000:]
    weights = [load_file(run / "model.safetensors") for run in (plain, slack, folder.path / "model")]
    assert same(*weights[:2])
    assert not same(*weights[1:])  # something was learned
    assert (slack / "holdfast" / "model" / "model.safetensors").samefile(slack / "model.safetensors")  # no second copy


def test_a_killed_run_goes_on_bit_for_bit(folder, mixed):
    steps = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4, "learning_rate": 0.02, "plugins": PLUGIN}
    block = {
        "safety": {"data": folder.write("steering", behaving.rows(60, seed=6))}, "monitor": {"prompts": 0},
        "certify": False, "report": False,
    }  # fmt: skip
    whole, code, said = folder.train("whole", mixed, DRIVEN, **steps, holdfast=block)
    assert code == 0, said[-3000:]
    killed, code, _ = folder.train("killed", mixed, DRIVEN, kill="checkpoint-4/manifest.json", **steps, holdfast=block)
    assert code == -9
    assert not (killed / "holdfast" / "result.json").exists()
    _, code, said = folder.train("killed", mixed, DRIVEN, **steps, holdfast=block)
    assert code != 0
    assert "auto_resume_from_checkpoints" in said  # a run that was broken off is not begun anew unasked
    _, code, said = folder.train("killed", mixed, DRIVEN, **steps, holdfast=block, auto_resume_from_checkpoints=True)
    assert code == 0, said[-3000:]
    assert same(adapter(whole), adapter(killed))
    rows = [read(run / "holdfast" / "events.jsonl") for run in (whole, killed)]
    assert [row["g"] for row in rows[0]] == [row["g"] for row in rows[1]]
    assert any(row["active"] for row in rows[0])
