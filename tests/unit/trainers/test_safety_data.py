"""Forms in which safety and task data arrive, and the proof that certify prompts stay unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from tests import tiny
from tests.unit.trainers.building import build, safety, task

import holdfast as hf
from holdfast.core.errors import DataError, UnsupportedError
from holdfast.data.examples import make_example, prompt_text
from holdfast.data.splits import require_unseen, split_examples, split_from_roles
from holdfast.training.safety import as_examples, splits_of, task_prompts

NO_CERTIFY = {"safety_fractions": (0.75, 0.25, 0.0)}


def rows() -> list[dict[str, str]]:
    return tiny.rows(20, seed=2)


def test_rows_examples_and_splits_are_the_same_thing(tmp_path):
    examples = [make_example(row["prompt"], row["completion"]) for row in rows()]
    forms = {
        "dataset": safety(), "list of rows": rows(), "examples": examples, "split": split_examples(examples, seed=42),
    }  # fmt: skip
    hashes = set()
    for i, form in enumerate(forms.values()):
        trainer = build(tmp_path / str(i), given={"safety_dataset": form})
        hashes.add(trainer.safety["safety"].reference.sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_the_same_as_its_rows(tmp_path, kind):
    file = tmp_path / "safety.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    args = hf.SafeSFTConfig(str(tmp_path / "run"), use_cpu=True, bf16=False)

    def ids(given) -> dict[str, dict[str, list[str]]]:
        found = splits_of(given, hf.ChanceConstraint(), args, [])
        return {
            name: {role: [e.id for e in own] for role, own in split.roles.items()} for name, (split, _) in found.items()
        }

    assert ids(kind(file)) == ids(rows())
    half = {"constraint": rows()[:10], "monitor": rows()[10:]}
    for name, own in half.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    assert ids({name: kind(tmp_path / f"{name}.jsonl") for name in half}) == ids(half)
    assert ids({"one": kind(file)})["one"] == ids(rows())["safety"]
    assert [e.id for e in as_examples(kind(file), "harmful")] == [e.id for e in as_examples(rows(), "harmful")]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        as_examples(str(tmp_path / "nowhere.jsonl"), "safety")


def test_hub_style_columns(tmp_path):
    turns = [("user", "human"), ("assistant", "gpt")]
    messages = [
        {"messages": [{"role": role, "content": row[key].strip()} for (role, _), key in zip(turns, row, strict=True)]}
        for row in rows()
    ]
    sharegpt = [
        {"conversations": [{"from": old, "value": row[key].strip()} for (_, old), key in zip(turns, row, strict=True)]}
        for row in rows()
    ]
    found = [
        build(tmp_path / str(i), given={"safety_dataset": Dataset.from_list(form)}).safety["safety"]
        for i, form in enumerate((messages, sharegpt))
    ]
    assert found[0].reference.sha256 == found[1].reference.sha256
    assert len(found[0].all_encoded) == 16


def test_unknown_columns_are_refused_with_a_proposal(tmp_path):
    renamed = Dataset.from_list([{"instruction": r["prompt"], "output": r["completion"]} for r in rows()])
    with pytest.raises(DataError, match="expected columns prompt and completion") as caught:
        build(tmp_path, given={"safety_dataset": renamed})
    assert "prompt: instruction, completion: output" in caught.value.remedy
    assert caught.value.exit_code == 3


def test_a_dataset_dict_with_the_roles_is_a_ready_made_split(tmp_path):
    ready = {"constraint": Dataset.from_list(rows()[:10]), "monitor": Dataset.from_list(rows()[10:15])}
    with_certify = DatasetDict({**ready, "certify": Dataset.from_list(rows()[15:])})
    found = build(tmp_path / "a", given={"safety_dataset": with_certify}).safety["safety"].split
    assert [len(part) for part in found.roles.values()] == [10, 5, 5]
    assert {e.prompt for e in found.monitor} == {row["prompt"] for row in rows()[10:15]}
    without = build(tmp_path / "b", given={"safety_dataset": DatasetDict(ready)}).safety["safety"].split
    assert [len(part) for part in without.roles.values()] == [10, 5, 0]


def test_roles_that_share_a_prompt_are_refused(tmp_path):
    shared = {"constraint": rows()[:10], "monitor": rows()[9:15]}
    with pytest.raises(DataError, match="constraint and monitor"):
        build(tmp_path, given={"safety_dataset": shared})


def certify_prompts(tmp_path) -> list[str]:
    split = build(tmp_path / "probe").safety["safety"].split
    return [prompt_text(e) for e in split.certify]


def test_a_certify_prompt_in_the_task_data(tmp_path):
    leaked = certify_prompts(tmp_path)[:2]
    mixed = Dataset.from_list([*task(), *({"prompt": p, "completion": "w9 w8"} for p in leaked)])
    with pytest.raises(DataError, match="2 of 4 certify prompts occur in the task data") as caught:
        build(tmp_path / "a", given={"train_dataset": mixed})
    assert caught.value.exit_code == 3
    assert not any(prompt in str(caught.value) for prompt in leaked)
    moved = build(tmp_path / "b", given={"train_dataset": mixed}, on_leak="move").safety["safety"].split
    assert [len(part) for part in moved.roles.values()] == [14, 4, 2]
    assert not {prompt_text(e) for e in moved.certify} & set(leaked)
    assert set(leaked) <= {prompt_text(e) for e in moved.constraint}
    assert moved.record.moved_from_certify == 2


@pytest.mark.parametrize("form", ["chat", "formatting function", "text"])
def test_leaks_are_found_in_every_task_format(tmp_path, form):
    leak = certify_prompts(tmp_path)[0]
    plain = [*task(), {"prompt": leak, "completion": "w9"}]
    given = {}
    if form == "chat":
        data = [
            {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": "w3"}]}
            for r in plain
        ]
    elif form == "text":
        data = [{"text": r["prompt"]} for r in plain]
    else:
        data = [{"question": r["prompt"]} for r in plain]
        given = {"formatting_func": lambda row: row["question"]}
    with pytest.raises(DataError, match="1 of 4 certify prompts"):
        build(tmp_path / "a", given={"train_dataset": Dataset.from_list(data), **given})


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


HOUSE = " ".join(f"w{i}" for i in range(30, 50))
INSIDE = {
    "system prompt": lambda p: {"messages": chat(("system", HOUSE), ("user", p), ("assistant", "w3"))},
    "second turn": lambda p: {
        "messages": chat(("user", HOUSE), ("assistant", "w3"), ("user", p), ("assistant", "w4")),
    },
    "turn in the completion": lambda p: {
        "prompt": chat(("user", HOUSE)),
        "completion": chat(("assistant", "w3"), ("user", p), ("assistant", "w4")),
    },
    "sharegpt": lambda p: {
        "conversations": [{"from": "system", "value": HOUSE}, {"from": "human", "value": p},
                          {"from": "gpt", "value": "w3"}],
    },
    "text": lambda p: {"text": f"{HOUSE} {p} w9 {HOUSE}"},
}  # fmt: skip


@pytest.mark.parametrize("form", INSIDE)
def test_leaks_inside_longer_rows_are_found(tmp_path, form):
    leak = certify_prompts(tmp_path)[0]
    plain = [row["prompt"] for row in task()]
    make = INSIDE[form]
    apart = task_prompts(Dataset.from_list([make(p) for p in plain]), None, "text")
    examples = [make_example(row["prompt"], row["completion"]) for row in rows()]
    require_unseen(examples, apart)
    with pytest.raises(DataError, match="1 of 4 certify prompts"):
        build(tmp_path / "a", given={"train_dataset": Dataset.from_list([make(p) for p in (*plain, leak)])})


@pytest.mark.parametrize("role", ["monitor", "certify"])
@pytest.mark.parametrize("as_split", [False, True])
def test_one_set_may_not_steer_by_what_another_holds_out(tmp_path, role, as_split):
    def given(watched):
        a = {"constraint": rows()[:6], "monitor": rows()[6:8]}
        b = {"constraint": rows()[10:14], role: watched}
        if as_split:
            a, b = ({k: [make_example(**row) for row in v] for k, v in roles.items()} for roles in (a, b))  # type: ignore[assignment]
            return {"a": split_from_roles(**a), "b": split_from_roles(**b)}
        return {"a": a, "b": b}

    assert set(build(tmp_path / "a", given={"safety_dataset": given(rows()[14:16])}).safety) == {"a", "b"}
    shared = rows()[2:4]
    with pytest.raises(DataError, match=f"2 {role} prompts of safety set 'b' are constraint prompts of 'a'") as caught:
        build(tmp_path / "b", given={"safety_dataset": given(shared)})
    assert not any(row["prompt"].strip() in str(caught.value) for row in shared)


def tokenised() -> Dataset:
    return Dataset.from_list([{"input_ids": [5, 6, 7, 8, 1], "labels": [-100, -100, 7, 8, 1]}] * 8)


@pytest.mark.parametrize("form", ["stream", "tokenised"])
def test_task_data_that_cannot_be_searched_needs_an_empty_certify_split(tmp_path, form):
    data = {"stream": lambda: task().to_iterable_dataset(), "tokenised": tokenised}[form]
    with pytest.raises(UnsupportedError, match="cannot be searched for certify prompts") as caught:
        build(tmp_path, given={"train_dataset": data()})
    assert "safety_fractions" in caught.value.remedy
    trainer = build(tmp_path / "b", given={"train_dataset": data()}, **NO_CERTIFY)
    trainer.train()
    assert trainer.run.progress.step == 3


def test_a_streaming_safety_set_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="is a stream") as caught:
        build(tmp_path, given={"safety_dataset": safety().to_iterable_dataset()})
    assert "materialise" in caught.value.remedy


def test_no_monitor_split_evaluates_nothing(tmp_path):
    trainer = build(tmp_path, safety_fractions=(1.0, 0.0, 0.0))
    assert trainer.evaluate() == {}
    assert trainer.degradations().shape == (0,)
    assert len(trainer.degradations(role="constraint")) == 20


def test_an_example_whose_reply_is_cut_off_is_refused_by_id(tmp_path):
    long = {"prompt": "w0 " + " ".join(f"w{i % 50}" for i in range(40)), "completion": "w5"}
    with pytest.raises(DataError, match="no completion token to score at max_length 32") as caught:
        build(tmp_path, given={"safety_dataset": Dataset.from_list([*rows(), long])}, safety_fractions=(1.0, 0.0, 0.0))
    assert make_example(long["prompt"], long["completion"]).id in caught.value.what
