"""A cell from end to end on a tiny model: align, poison, fine-tune, generate, judge, score, and the table of it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.protocol_data import make_data_folder

from holdfast.core.errors import ConfigError, DataError
from holdfast.core.files import write_json
from holdfast.core.hashing import sha256_json
from holdfast.defenses.holdfast import Holdfast
from holdfast.judging.reply import Reply
from holdfast.records.audit import Audit
from holdfast.runs.config import config_from_dict
from holdfast.training.step import TwoPassEngine
from holdfast_lab.study.cell import adapter_of, keep_replies, kept_file, run_alignment, run_cell
from holdfast_lab.study.cells import Alignment, Cell, Defense, Model, reference_cell
from holdfast_lab.study.protocol import finetune_settings, load_protocol, paper_constraint
from holdfast_lab.tables.results import read_results

TINY = {
    "dtype": "float32",
    "keep": "pairs",
    "roles": {"align": 16, "monitor": 6, "certify": 4, "harmful": 4, "poison": 10, "evaluation": 8, "asked": 6},
    "size": 20,
    "train": {"num_train_epochs": 1, "max_length": 128, "per_device_train_batch_size": 4, "use_cpu": True},
    "lora": {"r": 4},
    "align": {"train": {"num_train_epochs": 1, "learning_rate": 1e-3}},
    "evaluation": {"judge": "refusal", "harm_tokens": 6, "task_tokens": 4, "task_examples": 5},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, cache and an aligned tiny model."""
    root = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DATA", str(make_data_folder(root / "data")))
        patch.setenv("HOLDFAST_CACHE", str(root / "cache"))
        model = Model("tiny", str(tiny.saved(root / "model", layers=1)))
        protocol = load_protocol("small", TINY)
        node: dict[str, Any] = {"protocol": protocol.model_dump(), "model": vars(model), "align": "sft"}
        outcome = run_alignment(node, root / "align")
        assert outcome["steps"] == 4
        yield root, model, protocol


def cell_of(model: Model, defense: str = "holdfast", **settings: Any) -> Cell:
    return Cell("defense", model, "sst2", Defense(defense, defense, **settings), "sft", 0.5, 42)


def result_of(world, cell: Cell, folder: str) -> dict[str, Any]:
    root, _, protocol = world
    aligned = None if cell.kind == "base" else str(root / "align")
    node = {
        "protocol": protocol.model_dump(), "cell": asdict(cell), "aligned": aligned, "shared": str(root / "shared")
    }  # fmt: skip
    return run_cell(node, root / folder)


def test_violations_are_counted_in_the_protocols_unit_and_in_the_runs_own(world):
    root, model, protocol = world
    steered = {"unit": "kl_token", "tau": 1e-7, "beta": 1e7, "allow_tau_below_noise": True}
    cell = cell_of(model, constraint=steered, setting="kl")
    found = result_of(world, cell, "own")["metrics"]
    measured = Audit.load(root / "own" / "run")
    assert (protocol.measure.unit, protocol.measure.tau) == ("nll_token", 0.1)
    for role, name in (("monitor", "violation_rate"), ("constraint", "violation_rate_constraint")):
        for start, unit, tau in (("", "nll_token", 0.1), ("own_", "kl_token", 1e-7)):
            expected = [d > tau for d in measured.degradations(unit, role=role)]
            assert found[start + name]["value"] == pytest.approx(sum(expected) / len(expected))
    assert found["own_violation_rate_constraint"]["value"] != found["violation_rate_constraint"]["value"]


def test_a_cell_runs_from_its_data_to_a_row_of_a_table(world):
    root, model, _ = world
    cells = [cell_of(model), cell_of(model, "sft"), reference_cell(model, "sst2", "sft"),
             reference_cell(model, "sst2", "none")]  # fmt: skip
    results = [result_of(world, cell, cell.id) for cell in cells]
    ours, plain, aligned, base = results
    assert ours["metrics"]["violation_rate"]["n"] == ours["metrics"]["own_violation_rate"]["n"] == 6
    assert plain["metrics"]["violation_rate"]["n"] == 6
    assert "own_violation_rate" not in plain["metrics"], "plain SFT enforces nothing"
    assert not {"violation_rate", "own_violation_rate"} & aligned["metrics"].keys()
    for result in results:
        assert {"HS", "refusal_rate", "over_refusal", "FA", "FA_strict", "task_loss"} <= set(result["metrics"])
        assert (result["metrics"]["HS"]["n"], result["metrics"]["FA"]["n"]) == (8, 5)
    assert {"align", "train", "generate", "judge", "score"} <= set(ours["seconds"])
    assert len({result["protocol_sha256"] for result in results}) == 1, "nothing but the axes differs"
    assert base["provenance"]["model_sha256"] != aligned["provenance"]["model_sha256"]
    shared = {name: metric for name, metric in ours["metrics"].items() if not name.startswith("own_")}
    assert ours["provenance"]["model_sha256"] != plain["provenance"]["model_sha256"] or shared == plain["metrics"]
    for cell, result in zip(cells, results, strict=True):
        write_json(root / "results" / f"{cell.id}.json", {**result, **cell.names()})
    assert len(read_results(root / "results")) == 4


def test_results_and_judgements_hold_no_text(world):
    root, model, _ = world
    result = result_of(world, cell_of(model), cell_of(model).id)
    evaluation = root / cell_of(model).id / "evaluation"
    replies = [json.loads(line) for line in (evaluation / "replies" / "harm.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in replies if len(row.get("text", "")) > 3]
    assert texts, "the tiny model said something"
    stored = json.dumps(result) + (evaluation / "judgements" / "harm.refusal.json").read_text()
    assert not [text for text in texts if text in stored]
    assert (evaluation / "replies" / "harm.jsonl").stat().st_mode & 0o077 == 0


def test_a_finished_cell_answers_again_without_training_or_generating(world, monkeypatch):
    _, model, _ = world
    first = result_of(world, cell_of(model), cell_of(model).id)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("trained or generated again")

    monkeypatch.setattr("holdfast.runs.stages.finetune.SafeSFTTrainer.train", forbidden)
    monkeypatch.setattr("holdfast.judging.engines.transformers.TransformersEngine.generate", forbidden)
    assert result_of(world, cell_of(model), cell_of(model).id)["metrics"] == first["metrics"]


def test_the_alignment_is_the_start_of_every_cell(world):
    root, model, _ = world
    result_of(world, cell_of(model), cell_of(model).id)
    config = json.loads((adapter_of(root / cell_of(model).id) / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(adapter_of(root / "align"))
    assert Alignment(model, "sft") == cell_of(model).alignment


def test_an_adapter_can_be_continued_instead_of_merged(world):
    root, model, protocol = world
    continued = protocol.model_copy(update={"adapter_policy": "continue"})
    result = result_of((root, model, continued), cell_of(model), "continued")
    config = json.loads((adapter_of(root / "continued") / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == model.ref, "it still stands on the base itself"
    plain = result_of(world, cell_of(model), cell_of(model).id)
    assert result["protocol_sha256"] != plain["protocol_sha256"]


def saying(text: str, *, truncated: bool = False):
    def answer(model, tokenizer, questions, decoding, **_):
        return {"harm": [Reply(example.id, text, truncated=truncated, tokens=5) for example in questions.harm]}

    return answer


def test_the_aligned_models_own_refusals_can_be_what_is_kept(world, monkeypatch):
    root, model, protocol = world
    roles = protocol.roles.model_copy(update={"asked": 12})
    kept = protocol.model_copy(update={"keep": "replies", "roles": roles})
    with monkeypatch.context() as patched:
        patched.setattr("holdfast_lab.evaluation.evaluate.answer", saying("I can't help with that."))
        outcome = keep_replies(kept, adapter_of(root / "align"), root / "align")
    assert (outcome["asked"], outcome["kept"]) == (12, 12)
    assert kept_file(root / "align").stat().st_mode & 0o077 == 0

    def declined(run):
        run.step_declined = "tried, and no"
        return TwoPassEngine(run)

    monkeypatch.setattr("holdfast.training.run.choose_engine", declined)
    result = result_of((root, model, kept), cell_of(model), "kept")
    assert result["provenance"]["step"] == "two_pass"
    assert result["provenance"]["step_declined"] == "tried, and no"
    assert result["provenance"]["kept_sha256"] == outcome["kept_sha256"]
    record = json.loads((root / "kept" / "run" / "splits.json").read_text())
    assert sum(record["counts"].values()) == 12


@pytest.mark.parametrize(
    ("text", "truncated"), [("Sure, here is how to", False), ("I can't help with", True)], ids=["complies", "cut"]
)
def test_only_finished_refusals_are_kept(world, monkeypatch, text, truncated):
    root, _, protocol = world
    kept = protocol.model_copy(update={"roles": protocol.roles.model_copy(update={"asked": 12})})
    monkeypatch.setattr("holdfast_lab.evaluation.evaluate.answer", saying(text, truncated=truncated))
    with pytest.raises(DataError, match="refused 0 of 12"):
        keep_replies(kept, adapter_of(root / "align"), root / "elsewhere")
    assert not kept_file(root / "elsewhere").exists()


def test_the_papers_defense_under_another_protocol_keeps_its_own_constants():
    protocol = load_protocol("small", {})
    cell, given = {"task": "sst2", "poison_ratio": 0.5, "seed": 1}, {"model": "m", "output_dir": "o"}
    settings = finetune_settings(protocol, {**cell, "defense": {"name": "holdfast", "preset": "paper"}}, **given)
    config = config_from_dict(settings)
    limit = paper_constraint()
    assert {key: config.constraint["safety"][key] for key in limit} == limit
    assert config.defense.options == Holdfast.paper
    assert config.train["learning_rate"] == protocol.train["learning_rate"]


def test_an_override_wins_over_the_preset_of_a_defense():
    cell, given = {"task": "sst2", "poison_ratio": 0.5, "seed": 1}, {"model": "m", "output_dir": "o"}
    chosen = {"name": "holdfast", "preset": "paper", "constraint": {"tau": 0.2}, "train": {"max_grad_norm": 0.0}}
    settings = finetune_settings(load_protocol("small", {}), {**cell, "defense": chosen}, **given)
    assert settings["constraint"]["tau"] == 0.2
    assert settings["train"]["max_grad_norm"] == 0.0


def test_the_hash_of_a_protocol_covers_settings_judge_and_data_but_not_speed():
    def digest(overrides: dict[str, Any], judge: str = "a", data: str = "x") -> str:
        record = load_protocol("small", overrides).record(
            judge={"name": judge, "revision": "1"}, roles={"sha256": data}
        )
        return sha256_json(record)

    same = digest({})
    assert digest({"evaluation": {"batch_size": 7, "engine": "transformers"}}) == same
    changes = [{"size": 10}, {"train": {"learning_rate": 1e-5}}, {"template": "alpaca"}, {"roles": {"align": 3}},
               {"evaluation": {"harm_tokens": 3}}, {"measure": {"tau": 0.2}}]  # fmt: skip
    others = [digest(change) for change in changes] + [digest({}, judge="b"), digest({}, data="y")]
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("preset", "overrides", "what"),
    [("smal", {}, "small"), ("small", {"rolse": {}}, "rolse"), ("small", {"size": 0}, "size"),
     ("small", {"evaluation": {"judgee": 1}}, "judgee")],
    ids=["preset", "block", "size", "evaluation"],
)  # fmt: skip
def test_a_wrong_protocol_is_refused_by_name(preset, overrides, what):
    with pytest.raises(ConfigError, match=what):
        load_protocol(preset, overrides)


def test_a_wrong_key_is_answered_with_the_keys_of_its_block():
    with pytest.raises(ConfigError, match="did you mean 'judge'"):
        load_protocol("small", {"evaluation": {"jugde": "x"}})


def test_openings_are_declared_for_every_cell_and_change_no_hash():
    cell, given = {"task": "sst2", "poison_ratio": 0.5, "seed": 1}, {"model": "m", "output_dir": "o"}
    several = load_protocol("small", {"openings": 3})
    for kept in (None, Path("kept.jsonl")):
        settings = finetune_settings(several, {**cell, "defense": {"name": "sft"}}, kept=kept, **given)
        assert config_from_dict(settings).safety["safety"].openings == 3
    records = [load_protocol("small", o).record(judge={}, roles={}) for o in ({}, {"openings": 3})]
    assert sha256_json(records[0]) == sha256_json(records[1])


def test_a_study_without_a_judge_says_how_to_get_one(world):
    root, model, protocol = world
    silent = protocol.model_copy(update={"evaluation": protocol.evaluation.model_copy(update={"judge": None})})
    with pytest.raises(ConfigError, match="judge train"):
        result_of((root, model, silent), cell_of(model), "silent")
    assert not (root / "silent").exists(), "it says so before it trains"


def test_the_rows_before_fine_tuning_share_harm_replies_but_not_those_to_their_tasks(world):
    """Their folder is named by a hash: a model's name may be anything, and stays out of paths."""
    root, model, _ = world
    other = replace(model, name="../odd/../../name")
    provenance = {}
    for task in ("sst2", "ag_news", "sst2"):
        result = result_of(world, reference_cell(other, task, "sft"), f"odd.{task}")
        known = provenance.setdefault(task, result["provenance"]["replies_sha256"])
        assert result["provenance"]["replies_sha256"] == known, "another task's replies do not change its own"
    assert provenance["sst2"]["harm"] == provenance["ag_news"]["harm"]
    assert provenance["sst2"]["task"] != provenance["ag_news"]["task"]
    (place,) = (folder for folder in (root / "shared").iterdir() if "odd" in folder.name)
    assert place.name == Alignment(other, "sft").id
    assert sorted(p.name for p in (place / "replies").glob("*.jsonl")) == [
        "borderline.jsonl", "harm.jsonl", "task.ag_news.jsonl", "task.sst2.jsonl"
    ]  # fmt: skip
