"""Openings of prompts that everybody has: counted for one model before and one task."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.certification.ledger_state import Claim
from holdfast.certification.openings import Ledger, ScopedLedger, scope_of
from holdfast.core.errors import InfeasibleError
from holdfast.data.examples import make_example
from holdfast.data.shingles import prompt_marks

PUBLIC = [make_example(f"please tell me how the old mill number {n} grinds its corn", "") for n in range(5)]
OWN = [make_example(f"which wagon carries barrel {n} over the northern river bridge", "") for n in range(5)]
MODEL, OTHER, TASK = "a" * 64, "b" * 64, "c" * 64


def claim(after: str) -> Claim:
    return Claim(MODEL, after, "refusals", 0.5, 0.05, 8, 0.95, "fixed", {"template": "chat"})


def book(path: Path, before: str = MODEL, task: str = TASK) -> ScopedLedger:
    return ScopedLedger(path, scope_of(before, task), frozenset(example.id for example in PUBLIC))


def opened(ledger: Ledger, after: str, examples=(*PUBLIC, *OWN)):
    ids = [example.id for example in examples]
    return ledger.open(claim(after), ids, declared=1, texts=prompt_marks(examples))


@pytest.mark.parametrize(("before", "task"), [(OTHER, TASK), (MODEL, "d" * 64)], ids=["model", "task"])
def test_another_model_or_task_has_openings_of_its_own(tmp_path, before, task):
    path = tmp_path / "ledger.json"
    assert opened(book(path), "after", PUBLIC).number == 1
    assert opened(book(path, before, task), "after 2", PUBLIC).number == 1


def test_a_second_run_on_the_same_model_and_task_shares_them(tmp_path):
    path = tmp_path / "ledger.json"
    opened(book(path), "after", PUBLIC)
    with pytest.raises(InfeasibleError, match="undeclared"):
        opened(book(path), "after 2", PUBLIC[:1])


def test_the_same_text_in_another_form_is_the_same_prompt(tmp_path):
    path = tmp_path / "ledger.json"
    opened(book(path), "after", PUBLIC)
    turns = [make_example(({"role": "user", "content": e.prompt},), "") for e in PUBLIC]
    assert {e.id for e in turns}.isdisjoint(e.id for e in PUBLIC)
    other = ScopedLedger(path, scope_of(MODEL, TASK), frozenset(e.id for e in turns))
    with pytest.raises(InfeasibleError, match="undeclared"):
        opened(other, "after 2", turns)


def test_prompts_of_ones_own_count_whatever_they_are_opened_with(tmp_path):
    path = tmp_path / "ledger.json"
    opened(book(path), "after")
    with pytest.raises(InfeasibleError, match="undeclared"):
        opened(book(path, OTHER, "d" * 64), "after 2")
    with pytest.raises(InfeasibleError, match="undeclared"):
        opened(Ledger(path), "after 2", OWN)


def test_callers_see_their_own_ids(tmp_path):
    ledger = book(tmp_path / "ledger.json")
    ids = [example.id for example in (*PUBLIC, *OWN)]
    texts = prompt_marks((*PUBLIC, *OWN))
    ledger.close(str(tmp_path), "refusals", ids, declared=1, texts=texts)
    assert [set(share.ids) for share in ledger.closed(ids, texts=texts)] == [set(ids)]
    assert book(tmp_path / "ledger.json", OTHER).closed(ids[:5]) == []
    entry = opened(ledger, "after")
    plain = opened(Ledger(tmp_path / "plain.json"), "after")
    assert entry.split_sha256 == plain.split_sha256
    assert ledger.find(claim("after").sha256, ids) == entry
    ledger.settle(claim("after").sha256, ids, ["x"])
    assert ledger.came_to(claim("after").sha256, ids, ["x"])
    assert not ledger.came_to(claim("after").sha256, ids, ["y"])
    assert ledger.used(ids).count == 1
    assert Ledger(tmp_path / "ledger.json").used(ids[:5]).count == 0
