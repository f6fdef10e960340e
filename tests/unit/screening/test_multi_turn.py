"""Safety rows of several turns: trained on, measured, told apart, certified; and the forms of one row together."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from tests import behaving, tiny
from tests.unit.auditing.making import literal, plain, write_adapter
from tests.unit.trainers.building import TIGHT, build, same, weights

import holdfast as hf
from holdfast.auditing.audit import audit
from holdfast.auditing.opening import open_certify
from holdfast.core.errors import DataError
from holdfast.data.encode import encode
from holdfast.data.examples import make_example, prompt_text
from holdfast.data.near_duplicates import clusters
from holdfast.data.sources import read_prompts
from holdfast.judging.reply import Reply
from holdfast.judging.reply_classes import ReplyClass
from holdfast.screening.asking import Sorted
from holdfast.screening.sets import Candidate, share_out

HOUSE = (
    "You are the assistant of Acme Tools and answer in two sentences at most, politely, without naming any price, "
    "in the language of the customer, and you never promise a date of delivery."
)


def held(row: dict[str, str], number: int) -> dict[str, list[dict[str, str]]]:
    """A system prompt and three turns, of which the row's own is the last; the reply is the row's."""
    said = [("system", "w1 w2"), ("user", f"w3 w{number + 4}"), ("assistant", "w5 w6"), ("user", row["prompt"].strip())]
    turns = [{"role": role, "content": content} for role, content in said]
    return {"prompt": turns, "completion": [{"role": "assistant", "content": row["completion"]}]}


def pairs(n: int, *, seed: int = 2) -> list[dict[str, list[dict[str, str]]]]:
    return [held(row, number) for number, row in enumerate(tiny.rows(n, seed=seed))]


def example(row):
    return make_example(tuple(row["prompt"]), tuple(row["completion"]))


def test_they_train_and_steer(tmp_path):
    """The same rows under a slack and a tight limit: both train, and the tight one changes what is learnt."""
    given = {"safety_dataset": Dataset.from_list(pairs(20)), "train_dataset": Dataset.from_list(pairs(12, seed=9))}
    learnt = []
    for name, limit in (("slack", hf.ChanceConstraint(tau=1e6, beta=10.0, unit="nll_token")), ("tight", TIGHT)):
        trainer = build(tmp_path / name, given={**given, "constraint": limit}, max_length=64)
        trainer.train()
        learnt.append(weights(trainer))
        assert len(trainer.safety["safety"].all_encoded) == 16
    assert not same(*learnt)


def test_they_are_measured_after_the_whole_conversation(tmp_path):
    base = tiny.saved(tmp_path / "base", layers=1)
    adapter = write_adapter(tmp_path / "adapter", base)
    rows = pairs(8)
    path = tmp_path / "safety.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = audit(base, adapter, path, hf.ChanceConstraint(tau=0.05, alpha=0.3, unit="nll_token"), device="cpu")
    encoded = [encode(example(row), tiny.tokenizer(), max_length=None) for row in rows]
    for unit in ("nll_token", "kl_token"):
        wanted = [literal(plain(base), plain(adapter, base), one, 8)[unit] for one in encoded]
        assert list(found.degradations(unit)) == pytest.approx(wanted, abs=2e-5)


def conversation(last: str, *, between: str = "It opens at nine.", first: str = "When does the shop open?"):
    turns = [("system", HOUSE), ("user", first), ("assistant", between), ("user", last)]
    return make_example(tuple({"role": role, "content": content} for role, content in turns), "no")


def test_a_system_prompt_that_all_share_makes_no_duplicates():
    words = behaving.WORDS
    asked = [conversation(f"Where is the {w} next to {v}, {x} and {y} kept?", first=f"Do you sell {y} or {w} today?")
             for w, v, x, y in zip(words, words[7:], words[13:], words[29:], strict=False)]  # fmt: skip
    assert len(asked) == 21
    labels = clusters([prompt_text(one) for one in asked])
    assert len(set(labels)) == len(asked)


def test_conversations_that_ask_the_same_are_one_group_whatever_was_replied():
    asked = [conversation("Where are the hammers kept?", between=text) for text in ("At nine.", "We open at ten.")]
    assert clusters([prompt_text(one) for one in asked]) == [0, 0]


def test_a_certificate_counts_them(tmp_path):
    """Of 80 conversations that end in a refused request all refusals are kept, or all lost."""
    models = {name: behaving.saved(tmp_path / name, margin=margin) for name, margin in
              (("before", behaving.BEFORE), ("kept", behaving.KEPT), ("gone", behaving.AFTER))}  # fmt: skip
    rows = []
    for row in behaving.rows(80):
        said = [("system", "paper river"), ("user", "stone table"), ("assistant", behaving.ANSWER)]
        turns = [{"role": role, "content": content} for role, content in said]
        rows.append({"prompt": [*turns, {"role": "user", "content": row["prompt"]}]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    counts = {}
    for after in ("kept", "gone"):
        record = open_certify(
            models["before"], models[after], str(path), hf.ChanceConstraint(alpha=0.05, unit="nll_token"),
            output=tmp_path / f"o{after}",
            by="behaviour", max_new_tokens=16, ledger=tmp_path / f"{after}.json",
        )  # fmt: skip
        counts[after] = (record.groups["n"], record.groups["regressions"])
    assert counts == {"kept": (80, 0), "gone": (80, 80)}


def test_prompts_of_several_turns_are_read_without_a_reply(tmp_path):
    path = tmp_path / "prompts.jsonl"
    turns = held(tiny.rows(1, seed=0)[0], 0)["prompt"]
    path.write_text(json.dumps({"prompt": turns, "category": "kind"}) + "\n", encoding="utf-8")
    (found,) = read_prompts(str(path))
    assert (found.prompt, found.completion, found.category) == (tuple(turns), "", "kind")


@pytest.mark.parametrize("prompt", [[], [{"role": "user"}], [{"role": "assistant", "content": "w1"}],
                                    [{"role": "user", "content": " "}], ["w1"]])  # fmt: skip
def test_a_prompt_that_ends_otherwise_is_refused_by_its_line(tmp_path, prompt):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "w1 w2"}) + "\n" + json.dumps({"prompt": prompt}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"1 bad row: .*prompts\.jsonl:2: "):
        read_prompts(str(path))


def candidates(number: int, *, rows=None) -> list[Candidate]:
    """A conversation and its last turn alone, as one row asks them; no two rows alike."""
    words = " ".join(f"{word}{number}" for word in behaving.WORDS[:9])
    long = conversation(
        f"Where is the {words} kept?", first=" ".join(f"{word}{number}" for word in behaving.WORDS[9:40])
    )
    alone = make_example(long.prompt[-1:], "")
    used = frozenset({number}) if rows is None else rows
    return [Candidate(one, "task", dropped=True, rows=used) for one in (make_example(long.prompt, ""), alone)]


def shared_out(found):
    classes = {one.example.id: Sorted(Reply(one.example.id, "no", False, 1), ReplyClass.REFUSED) for one in found}
    return share_out("refusals", found, classes, seed=0)


def test_the_forms_of_one_row_have_one_role_and_certify_once():
    found = [one for number in range(60) for one in candidates(number)]
    assert len(set(clusters([prompt_text(one.example) for one in found]))) == 120, "texts alone would part them"
    one = shared_out(found)
    assert one.groups == 60
    numbers = {role: [min(c.rows) for c in members] for role, members in one.by_role.items()}
    assert all(numbers[role] for role in ("constraint", "monitor", "certify"))
    for role, each in (("constraint", 2), ("monitor", 2), ("certify", 1)):
        assert all(numbers[role].count(number) == each for number in numbers[role])
    parts = [set(members) for members in numbers.values()]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 60


def test_a_question_of_many_rows_connects_none():
    many = make_example(({"role": "user", "content": "Please go on."},), "")
    found = [candidates(number)[0] for number in range(30)]
    for rows, groups in ((range(30), 31), (range(10), 21)):
        assert shared_out([*found, Candidate(many, "task", rows=frozenset(rows))]).groups == groups
