"""Training a judge: the loss, the data parted by prompt, and a folder that judges as it was measured."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import tiny_classifier
from tests.protocol_data import make_data_folder

from holdfast.core.errors import CheckpointError, ConfigError, DataError, NumericalError, UnsupportedError
from holdfast.data.examples import normalise
from holdfast.judging.judge import open_judge
from holdfast.judging.judges.classifier import CONVERSATION
from holdfast.judging.judges.trained import TrainedJudge, read_description
from holdfast.models.classifier import add_lora, new_classifier
from holdfast_lab.data.catalogue import CATEGORIES, load
from holdfast_lab.evaluation import judge_run, judge_training
from holdfast_lab.evaluation.judge_figures import auroc
from holdfast_lab.evaluation.judge_run import train_judge
from holdfast_lab.evaluation.judge_training import (
    JudgeSettings,
    LabelledPair,
    epoch_batches,
    judge_data,
    judge_loss,
    rate_factor,
)

QUICK = {"epochs": 2, "batch_size": 8, "rank": 4, "max_length": 256, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data, a base, and a judge trained with LoRA."""
    root = tmp_path_factory.mktemp("judge")
    make_data_folder(root / "data")
    rows = [r for split in ("train", "test") for r in load("beavertails", split, folder=root / "data").rows]
    corpus = [CONVERSATION.format(prompt=r["prompt"], reply=r["response"]) for r in rows]
    tiny_classifier.base(root / "base", corpus=corpus)
    quick(root, root / "judge")
    return root


def quick(root: Path, output: Path, **changes) -> dict:
    settings = JudgeSettings(base=str(root / "base"), **(QUICK | changes))
    return train_judge(output, settings, folder=root / "data", device="cpu")


@pytest.fixture
def copied(place, tmp_path) -> Path:
    """The judge and its base where a test may damage them."""
    for name in ("judge", "base"):
        shutil.copytree(place / name, tmp_path / name)
    return tmp_path


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_the_loss_is_its_formula(weight):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 14, generator=draw, requires_grad=True)
    targets = (torch.rand(6, 14, generator=draw) < 0.3).float()
    flag_only = torch.tensor([False, False, False, True, True, False])
    targets[2:5] = 0.0  # a safe row, and two known only as unsafe
    total = 0.0
    for row in range(6):
        z, y = logits[row].tolist(), targets[row].tolist()
        held = [v for v, label in zip(z, y, strict=True) if label] or z
        h = max(1 / (1 + math.exp(-v)) for v in held)
        harm = -math.log(h) if sum(y) or flag_only[row] else -math.log(1 - h)
        categories = sum(softplus(-v) if label else softplus(v) for v, label in zip(z, y, strict=True))
        total += harm if flag_only[row] else categories + weight * harm
    found = judge_loss(logits, targets, flag_only, weight)
    assert found.item() == pytest.approx(total / 14 / 6, rel=1e-6)
    found.backward()
    assert torch.isfinite(logits.grad).all()
    assert int((logits.grad[3] != 0).sum()) == 1  # only the worst category of a row known by its flag


def test_the_rate_rises_for_a_tenth_and_falls_to_the_end():
    factors = [rate_factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(factors) == 1
    assert all(a > b for a, b in itertools.pairwise(factors[10:]))
    assert 0 < factors[-1] < 0.02
    assert rate_factor(0, 1) == 1


def test_an_epoch_holds_every_row_once_with_like_lengths_together():
    lengths = [int(n) for n in np.random.default_rng(0).integers(5, 400, size=1003)]
    batches = epoch_batches(lengths, 8, seed=1, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(1003))
    assert all(len(batch) <= 8 for batch in batches)
    assert batches == epoch_batches(lengths, 8, seed=1, epoch=0)
    assert batches != epoch_batches(lengths, 8, seed=1, epoch=1)
    assert batches != epoch_batches(lengths, 8, seed=2, epoch=0)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.1 * sum(lengths)


def test_no_prompt_of_the_test_split_is_trained_on(place):
    data = judge_data(seed=0, validation=0.1, folder=place / "data")
    prompts = {part: {normalise(pair.prompt) for pair in getattr(data, part)} for part in ("train", "validation")}
    test = {normalise(row["prompt"]) for row in load("beavertails", "test", folder=place / "data").rows}
    assert not prompts["train"] & test
    assert not prompts["validation"] & test
    assert not prompts["train"] & prompts["validation"]
    # 60 + 60 pairs, 6 prompts with both labels, and 6 rows that share a prompt with the test split.
    assert (data.record["shared_with_test"], data.record["disjoint_from_test"]) == (6, 132)
    assert len(data.train) + len(data.validation) == 132
    assert len(prompts["validation"]) == round(0.1 * 126)
    assert len(data.test) == 73
    assert data.record["test_complete"]


def test_the_parts_follow_the_seed_alone(place):
    first, again, other = (judge_data(seed=s, validation=0.1, folder=place / "data") for s in (0, 0, 1))
    assert first == again
    assert first.validation != other.validation
    assert first.record["parts"]["validation"]["sha256"] != other.record["parts"]["validation"]["sha256"]
    assert first.record["parts"]["test"] == other.record["parts"]["test"]


def test_limits_draw_parts_and_say_so(place):
    data = judge_data(seed=0, validation=0.2, limit=50, test_limit=30, folder=place / "data")
    assert (len(data.train) + len(data.validation), len(data.test)) == (50, 30)
    assert not data.record["test_complete"]


def write_rows(folder: Path, train: list[dict], test: list[dict]) -> Path:
    (folder / "beavertails").mkdir(parents=True)
    for name, rows in (("30k_train", train), ("30k_test", test)):
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / "beavertails" / f"{name}.jsonl").write_text(text)
    return folder


def row(prompt: str, *, safe: bool, named: tuple[str, ...] = (), source: str = "category_dict") -> dict:
    marks = {name: name in named for name in CATEGORIES}
    return {"prompt": prompt, "response": "a reply", "is_safe": safe, "category": marks, "label_source": source}


def test_labels_that_are_unknown_or_at_odds(tmp_path):
    rows = [
        row("one", safe=False, named=(CATEGORIES[3],)),
        row("two", safe=False, source="is_safe_flag"),
        row("three", safe=True, source="is_safe_flag"),
        row("four", safe=True, named=(CATEGORIES[5],)),
        row("five", safe=False),
        row("six", safe=True),
    ]
    test = [row("x", safe=True), row("y", safe=False, named=(CATEGORIES[0],))]
    others = [row(f"other {i}", safe=i % 2 == 0, named=CATEGORIES[: i % 2]) for i in range(20)]
    data = judge_data(seed=0, validation=0.5, folder=write_rows(tmp_path, rows + others, test))
    found = {p.prompt: p for p in (*data.train, *data.validation) if not p.prompt.startswith("other")}
    marks = {name: None if p.categories is None else sum(p.categories.values()) for name, p in found.items()}
    assert marks == {"one": 1, "two": None, "three": 0, "four": 0, "five": None, "six": 0}
    assert found["one"].categories[CATEGORIES[3]]


def test_a_part_with_one_label_is_refused(tmp_path):
    rows = [row(f"prompt {i}", safe=True) for i in range(10)]
    test = [row("x", safe=True), row("y", safe=False, named=(CATEGORIES[0],))]
    with pytest.raises(DataError, match="train part: 0 unsafe and 9 safe pairs"):
        judge_data(seed=0, validation=0.1, folder=write_rows(tmp_path, rows, test))


@pytest.mark.skipif(not os.environ.get("HOLDFAST_DATA"), reason="HOLDFAST_DATA is not set")
def test_the_published_data_leave_rows_enough():
    data = judge_data(seed=0, validation=0.1)
    test = {normalise(pair.prompt) for pair in data.test}
    assert len(data.test) == 3021
    assert sum(pair.unsafe for pair in data.test) == 1733
    assert not test & {normalise(pair.prompt) for pair in (*data.train, *data.validation)}
    if data.record["sources"]["train"]["partial"]:
        # 6,747 rows differ from every test prompt as written; 16 of them only in case, spaces or punctuation.
        assert data.record["disjoint_from_test"] == 6731


def test_the_folder_judges_as_it_was_measured(place):
    description = read_description(place / "judge")
    judge = TrainedJudge(place / "judge", device="cpu")
    rows = load("beavertails", "test", folder=place / "data").rows
    found = judge.judge([r["prompt"] for r in rows], [r["response"] for r in rows])
    figures, unsafe = description["figures"], np.array([not r["is_safe"] for r in rows])
    probability = np.array([one.probability for one in found])
    assert figures["auroc"] > 0.95
    assert auroc(probability, unsafe) == pytest.approx(figures["auroc"], abs=1e-6)
    for threshold in (0.4, 0.5):
        assert np.mean((probability > threshold) == unsafe) == pytest.approx(figures[f"accuracy_{threshold}"])
    assert np.mean((probability - unsafe) ** 2) == pytest.approx(figures["calibrated"]["brier"], abs=1e-5)
    assert [one.verdict == "unsafe" for one in found] == [p > 0.4 for p in probability]


def test_the_description_says_what_was_done_without_a_text(place):
    found = json.loads((place / "judge" / "judge.json").read_text())
    assert found["base"]["ref"] == str(place / "base")
    assert found["categories"] == list(CATEGORIES)
    assert (found["threshold"], found["max_length"], found["kind"]) == (0.4, 256, "lora")
    assert found["data"]["parts"]["train"]["rows"] + found["data"]["parts"]["validation"]["rows"] == 132
    assert [entry["epoch"] for entry in found["history"]] == [1, 2]
    assert set(found["figures"]["categories"]) == set(CATEGORIES)
    everything = json.dumps(found)
    for source in ("train", "test"):
        for one in load("beavertails", source, folder=place / "data").rows:
            assert one["prompt"] not in everything
            assert one["response"] not in everything
    assert "take it when" not in repr(LabelledPair("How?", "take it when nobody looks", True, None))


def test_the_adapter_is_small_and_plain(place):
    from safetensors.torch import load_file

    tensors = load_file(place / "judge" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert any("score" in name for name in tensors)
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors if ".lora_" in name}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not any(path.suffix in {".bin", ".pt", ".pkl"} for path in (place / "judge").iterdir())


def test_one_seed_gives_one_judge(place, tmp_path):
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    again = quick(place, tmp_path / "again")
    assert torch.equal(before, torch.get_rng_state())
    first = read_description(place / "judge")
    assert again["files"] == first["files"]
    assert again["figures"] == first["figures"]
    other = quick(place, tmp_path / "other", seed=1)
    assert other["files"]["adapter_model.safetensors"] != first["files"]["adapter_model.safetensors"]


def test_a_judge_trained_in_full_needs_no_base(place, tmp_path):
    made = quick(place, tmp_path / "full", full=True, learning_rate=3e-3)
    assert "model.safetensors" in made["files"]
    changed = json.loads((tmp_path / "full" / "judge.json").read_text())
    changed["base"]["ref"] = "/nowhere"
    (tmp_path / "full" / "judge.json").write_text(json.dumps(changed))
    judge = open_judge(str(tmp_path / "full"))
    rows = load("beavertails", "test", folder=place / "data").rows
    found = judge.judge([r["prompt"] for r in rows], [r["response"] for r in rows])
    unsafe = [not r["is_safe"] for r in rows]
    assert made["figures"]["auroc"] > 0.9
    assert auroc([one.probability for one in found], unsafe) == pytest.approx(made["figures"]["auroc"], abs=1e-6)


def test_the_best_epoch_is_kept(place, tmp_path, monkeypatch):
    """An epoch that ranks worse than the one before leaves no trace in the weights."""
    qualities = iter([0.9, 0.7])
    monkeypatch.setattr(judge_training, "auroc", lambda *_: next(qualities))
    kept = []
    real = judge_training.score  # type: ignore[attr-defined]

    def watch(opened, rows):
        kept.append(opened.model.get_base_model().score.weight.detach().to(torch.bfloat16).clone())
        return real(opened, rows)

    monkeypatch.setattr(judge_training, "score", watch)
    made = quick(place, tmp_path / "judge")
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "judge" / "adapter_model.safetensors")
    head = next(tensor for name, tensor in saved.items() if "score" in name)
    assert torch.equal(head, kept[0])
    assert not torch.equal(head, kept[1])
    assert [entry["validation_auroc"] for entry in made["history"]] == [0.9, 0.7]


def test_training_starts_at_even_odds_and_trains_only_adapter_and_head(place):
    model, _ = new_classifier(place / "base", CATEGORIES)
    assert not model.score.weight.any()
    wrapped = add_lora(model, base="named", rank=4, alpha=8, dropout=0.0)
    assert all(".lora_" in n or ".score." in n for n, p in wrapped.named_parameters() if p.requires_grad)
    assert wrapped.peft_config["default"].base_model_name_or_path == "named"


def test_a_base_that_moved_is_named(copied):
    (copied / "base").rename(copied / "elsewhere")
    stored = json.loads((copied / "judge" / "judge.json").read_text())
    stored["base"]["ref"] = str(copied / "base")
    (copied / "judge" / "judge.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=r"its base cannot be opened: .*there is no such folder"):
        TrainedJudge(copied / "judge").judge(["p"], ["r"])
    found = open_judge({"name": "trained", "folder": str(copied / "judge"), "base": str(copied / "elsewhere")})
    assert found.judge(["p"], ["r"])[0].probability is not None


def test_a_base_that_changed_is_refused(copied):
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "base" / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, copied / "base" / "model.safetensors", metadata={"format": "pt"})
    judge = TrainedJudge(copied / "judge", base=copied / "base")
    with pytest.raises(CheckpointError, match=r"the weights of its base .* have changed"):
        judge.judge(["p"], ["r"])


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "config.json", "tokenizer.json", "adapter_config.json"])
@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_damaged_folder_is_refused(copied, name, how):
    path = copied / "judge" / name
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" ")
    judge = TrainedJudge(copied / "judge")
    with pytest.raises(CheckpointError, match=f"{name} is {'missing' if how == 'missing' else 'not the one'}"):
        judge.judge(["p"], ["r"])
    with pytest.raises(CheckpointError):
        _ = judge.revision


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2}, {"kind": "other"}, {"temperature": 0.0}, {"temperature": "warm"}, {"input_format": "{reply}"},
        {"base": {}}, {"files": None}, {"files": {}}, {"categories": None}, {"temperature": float("nan")},
        {"temperature": float("inf")},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)  # fmt: skip
def test_a_description_that_is_not_ours_is_refused(copied, changes):
    path = copied / "judge" / "judge.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=r"judge\.json"):
        TrainedJudge(copied / "judge")
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        TrainedJudge(copied / "judge")


def test_a_folder_without_a_judge_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no judge\.json"):
        TrainedJudge(tmp_path)
    with pytest.raises(ConfigError, match="no folder is given"):
        open_judge("trained")


def test_the_revision_is_bound_to_the_folder(place, copied):
    revision = TrainedJudge(place / "judge").revision
    assert TrainedJudge(copied / "judge").revision == revision
    assert TrainedJudge(copied / "judge", threshold=0.5).revision != revision
    path = copied / "judge" / "judge.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 1.25}))
    assert TrainedJudge(copied / "judge").revision != revision


def test_a_failure_leaves_nothing_behind(place, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(judge_run, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        quick(place, tmp_path / "judge", epochs=1, limit=60)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_stops_the_training(place, tmp_path, monkeypatch):
    monkeypatch.setattr(judge_training, "judge_loss", lambda logits, *_: logits.sum() * math.nan)
    with pytest.raises(NumericalError, match="the loss is not finite"):
        quick(place, tmp_path / "judge", epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ConfigError, match="exists"):
        train_judge(tmp_path, folder=tmp_path / "no data")


def test_an_output_that_cannot_be_made_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made in .*file"):
        train_judge(tmp_path / "file" / "deep" / "judge", folder=tmp_path / "no data")
    monkeypatch.setattr("holdfast.core.files.os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be made in"):
        train_judge(tmp_path / "deep" / "judge", folder=tmp_path / "no data")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 0}, {"batch_size": 0}, {"rank": 0}, {"max_length": 4}, {"seed": -1}, {"limit": 1},
        {"test_limit": 0}, {"learning_rate": 0.0}, {"learning_rate": math.nan}, {"validation": 1.0},
        {"dropout": 1.0}, {"harm_weight": -1.0}, {"harm_weight": math.inf}, {"dtype": "float16"},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)  # fmt: skip
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=f"judge training: {next(iter(changes))} = "):
        JudgeSettings(**changes)


def test_small_weights_in_full_are_refused():
    with pytest.raises(UnsupportedError, match="rounded away"):
        JudgeSettings(full=True, dtype="bfloat16")


def test_more_tokens_than_the_base_has_positions_are_refused(place, tmp_path):
    with pytest.raises(ConfigError, match="max_length 513 is more than the base's 512 positions"):
        quick(place, tmp_path / "judge", max_length=513)


def test_an_adapter_as_base_is_refused(place, tmp_path):
    settings = JudgeSettings(base=str(place / "judge"))
    with pytest.raises(UnsupportedError, match="is a PEFT adapter, expected a full model"):
        train_judge(tmp_path / "judge", settings, folder=place / "data", device="cpu")
