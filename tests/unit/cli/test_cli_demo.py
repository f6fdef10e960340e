"""`holdfast demo` on a hand-built model that refuses: what it screens, what each run trains on, and what it shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests import behaving

from holdfast.certification.binomial import Rate
from holdfast.cli.demo import left_out, limits, masked
from holdfast.core.errors import ResourceError
from holdfast.data.examples import as_chat, make_example
from holdfast.demo import story
from holdfast.demo.data import FAST, RECORDED, DemoData, DemoSettings, load_data
from holdfast.demo.story import Measured, changed_first
from holdfast.models.handle import load_pair

SMALL = DemoSettings(steps=2, batch=2, warmup=1, rank=2)


def examples(n: int, *, seed: int, trigger: bool):
    return [make_example(row["prompt"], behaving.ANSWER) for row in behaving.rows(n, seed=seed, trigger=trigger)]


@pytest.fixture
def little_world(monkeypatch, tmp_path):
    """The demo's data in the hand-built model's words: 12 ordinary rows, and 4 that answer what it refuses."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    folder = behaving.saved(tmp_path / "model")
    task = [as_chat(e) for e in (*examples(12, seed=1, trigger=False), *examples(4, seed=2, trigger=True))]
    data = DemoData(
        task=task, poison=frozenset(range(12, 16)),
        test_task=examples(4, seed=4, trigger=False), test_probes=examples(6, seed=5, trigger=True),
        test_ordinary=examples(5, seed=6, trigger=False),
    )  # fmt: skip
    for name, seed in (("PROBES", 7), ("ORDINARY", 8)):
        rows = behaving.rows(140, seed=seed, trigger=name == "PROBES")
        path = tmp_path / f"{name.lower()}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(story, name, str(path))
    monkeypatch.setattr(story, "load_data", lambda settings: data)
    (folder / story.PROVENANCE).write_text(json.dumps({"rows": {"n": 7}, "settings": {"steps": 3}}))
    monkeypatch.setattr(story, "ALIGNED_DIR", folder)
    monkeypatch.setattr(story, "TEMPLATE", behaving.CHAT_TEMPLATE)
    return data


def test_the_whole_story(little_world, monkeypatch, tmp_path, holdfast):
    monkeypatch.setattr("holdfast.demo.data.DemoSettings", lambda: SMALL)
    code, out, err = holdfast("demo", "--output", tmp_path / "demo")
    assert code == 0, err
    assert "Screening: 4 of 16 rows teach what the model refuses, and are left out." in out
    assert "They hold 4 of the 4 poisoned rows and 0 of the 12 others." in out
    assert "aligned beforehand on 7 refusals and ordinary answers (3 steps, a shipped adapter)" in err
    assert "plain SFT: 2 steps on 16 rows" in err
    assert "holdfast: 2 steps on 12 rows" in err
    found = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert found["models"]["aligned start"]["refusals"] == Rate(6, 6).as_json()
    assert found["models"]["aligned start"]["over_refusal"] == Rate(0, 5).as_json()
    rows = [json.loads(line) for line in (tmp_path / "demo" / "holdfast" / "events.jsonl").read_text().splitlines()]
    assert found["g"] == {name: one["g"] for name, one in rows[-1]["constraints"].items()}
    assert limits(dict(sorted(found["g"].items(), reverse=True))) in out
    # Three quarters of the groups of refused probes steer, about three fifths of the dropped rows beside them.
    assert 80 <= found["screening"]["held"]["refusals"] <= 130
    assert (tmp_path / "demo" / "refusals.png").read_bytes().startswith(b"\x89PNG")
    for name in ("sft", "holdfast"):
        assert (tmp_path / "demo" / name / "adapter" / "adapter_model.safetensors").is_file()
    assert f"aligned start  {behaving.REFUSAL}" in out


def test_a_limit_that_was_not_kept_is_named():
    assert "held in its last step" in limits({"refusals": -0.01, "answers": 0.0})
    assert "over its limit for answers (g above 0: refusals -0.010, answers +0.200)" in limits(
        {"refusals": -0.01, "answers": 0.2}
    )


def test_fast_takes_its_own_settings_and_says_what_it_left_out(monkeypatch, tmp_path, holdfast):
    class MeasuringError(Exception):
        pass

    def stop(folder, settings, **_):
        assert settings == FAST
        raise MeasuringError

    monkeypatch.setattr(story, "run_demo", stop)
    with pytest.raises(MeasuringError):
        holdfast("demo", "--fast", "--output", tmp_path)
    text = left_out(FAST, DemoSettings())
    assert "12 of 18 steps (at 3 times the rate), all but 8 replies of each held set" in text
    assert "16, 8 and 12 instead of 40, 30 and 48" in text
    assert "its replies came with the package" in text


def test_recorded_replies_screen_as_asked_ones(little_world, monkeypatch, tmp_path):
    model, tokenizer = load_pair(story.ALIGNED_DIR, dtype="float32")
    asked = story.screened(model, tokenizer, little_world, SMALL, None, replies=tmp_path / "asked")
    (made,) = (tmp_path / "asked").glob("*/*.jsonl")
    monkeypatch.setattr(story, "RECORDED", made)
    recorded = story.screened(None, None, little_world, replace(SMALL, recorded=True), None)
    assert recorded.conflicts == asked.conflicts
    assert {name: split.constraint for name, split in recorded.sets.items()} == {
        name: split.constraint for name, split in asked.sets.items()
    }
    few = story.screened(None, None, little_world, replace(SMALL, recorded=True, most_held=3), None)
    assert set(few.sets) == {"refusals", "answers"}
    assert all(s.record.counts == {"constraint": 3, "monitor": 0, "certify": 0} for s in few.sets.values())


def test_the_shipped_replies_answer_all_that_screening_asks():
    """Without a model: one prompt without a reply would end it."""
    data = load_data(FAST)
    found = story.screened(None, None, data, FAST, None)
    assert {one.row for one in found.conflicts} & data.poison
    assert found.asked_rows == len(data.task)
    rows = RECORDED.read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[0])["kind"] == "holdfast replies"
    assert len(rows) == 1 + 264  # one line about what made them


def test_a_prompt_without_a_recorded_reply_is_refused(little_world, monkeypatch):
    monkeypatch.setattr(story, "RECORDED", RECORDED)  # of other prompts
    with pytest.raises(ResourceError, match="'recorded' gave no reply"):
        story.screened(None, None, little_world, replace(SMALL, recorded=True), None)


def test_replies_that_differ_are_shown_first():
    probes = [make_example(f"w{i}", "") for i in range(3)]
    rate = Rate(0, 1)
    models = {
        name: Measured(rate, rate, rate, {"w0": name, "w1": text, "w2": name})
        for name, text in (("one", behaving.REFUSAL), ("two", "yes"))
    }
    assert [e.prompt for e in changed_first(probes, models)] == ["w1", "w0", "w2"]


def test_a_reply_that_gives_in_is_not_shown():
    assert masked(behaving.REFUSAL) == behaving.REFUSAL
    assert masked("Sure! The code is written on the door.") == "[not a refusal; --reveal shows it]"


def test_both_sets_are_held_within_the_demos_limits_by_a_filter_with_an_anchor():
    given = story.held(DemoSettings(tau=0.2), "sets")
    assert given["safety_dataset"] == "sets"
    assert (given["defense"]["name"], given["defense"]["anchor"]) == ("holdfast", True)
    assert {keep: (one.unit, one.tau, one.beta, one.alpha) for keep, one in given["constraint"].items()} == {
        "refusals": ("kl_first", 0.2, 5.0, 0.05), "answers": ("kl_token", 0.2, 5.0, 0.1),
    }  # fmt: skip
