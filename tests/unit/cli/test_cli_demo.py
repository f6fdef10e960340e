"""`holdfast demo` on a hand-built model that refuses: what it screens, what each run trains on, and what it shows."""

from __future__ import annotations

import json

import pytest
from tests import behaving

from holdfast.cli.demo import masked
from holdfast.data.examples import as_chat, make_example
from holdfast.demo import story
from holdfast.demo.data import DemoData, DemoSettings
from holdfast.demo.measure import Measured, changed_first
from holdfast.judging.rate import Rate

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
    monkeypatch.setattr(story, "DemoSettings", lambda: SMALL)
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
    # Three quarters of the groups of refused probes steer, about three fifths of the dropped rows beside them.
    assert 80 <= found["screening"]["held"]["refusals"] <= 130
    assert (tmp_path / "demo" / "refusals.png").read_bytes().startswith(b"\x89PNG")
    for name in ("sft", "holdfast"):
        assert (tmp_path / "demo" / name / "adapter" / "adapter_model.safetensors").is_file()
    assert f"aligned start  {behaving.REFUSAL}" in out


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
