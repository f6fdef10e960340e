"""The ledger: an opening is entered before it happens, counted once, and never beyond what was declared."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.certification.ledger_state import Claim, look_sha256
from holdfast.certification.openings import Closed, Ledger, Used, default_ledger, split_sha256
from holdfast.core.errors import CheckpointError, ConfigError, DataError, InfeasibleError
from holdfast.data.examples import make_example
from holdfast.data.shingles import prompt_marks
from holdfast.data.split_record import id_hashes

CLAIM = Claim("b" * 64, "a" * 64, "nll_token", 0.1, 0.05, 8, 0.95, "fixed", {"template": "chat", "pool": None})
SETTINGS = {"template": "chat", "tokenizer": "same", "max_length": None}
IDS = [f"{i:016x}" for i in range(60)]
FRESH = [f"{i:016x}" for i in range(100, 160)]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.json")


def other(number: int) -> Claim:
    return replace(CLAIM, after_sha256=f"{number:064x}")


def test_an_opening_is_written_and_numbered(ledger):
    found = ledger.open(CLAIM, IDS)
    assert (found.declared, found.number) == (1, 1)
    of_a_run = id_hashes({"constraint": [], "monitor": [], "certify": IDS})
    assert found.split_sha256 == split_sha256(IDS) == of_a_run["certify"]
    assert Ledger(ledger.path).find(CLAIM.sha256, IDS[::-1]) == found
    assert ledger.find(other(1).sha256, IDS) is None
    assert ledger.find(CLAIM.sha256, IDS[:-1]) is None


def test_checking_writes_nothing(ledger):
    assert ledger.check(CLAIM, IDS).number == 1
    assert not ledger.path.exists()


def test_the_same_claim_is_the_same_opening_whatever_the_order_of_prompts(ledger):
    first = ledger.open(CLAIM, IDS)
    written = ledger.path.read_bytes()
    assert ledger.open(CLAIM, IDS[::-1]) == first
    assert ledger.path.read_bytes() == written


@pytest.mark.parametrize(
    "change",
    [
        {"before_sha256": "0" * 64}, {"after_sha256": "0" * 64}, {"unit": "nll_sum"}, {"tau": 0.2}, {"alpha": 0.1},
        {"first_k": 4}, {"confidence": 0.9}, {"kind": "per_category"}, {"settings": {"template": "none", "pool": None}},
    ],
)  # fmt: skip
def test_whatever_changes_the_claim_is_another_opening(ledger, change):
    ledger.open(CLAIM, IDS)
    with pytest.raises(InfeasibleError, match="an undeclared opening never certifies") as refusal:
        ledger.open(replace(CLAIM, **change), IDS)
    assert "fresh prompts" in refusal.value.remedy
    assert refusal.value.exit_code == 4
    ledger.open(replace(CLAIM, **change), FRESH)


def test_a_refused_opening_leaves_no_entry(ledger):
    ledger.open(CLAIM, IDS)
    written = ledger.path.read_bytes()
    for attempt in (ledger.check, ledger.open):
        with pytest.raises(InfeasibleError):
            attempt(other(1), IDS)
    assert ledger.path.read_bytes() == written


def test_declared_openings_share_delta_and_then_end(ledger):
    for number in (1, 2, 3):
        found = ledger.open(other(number), IDS, declared=3)
        assert (found.number, found.declared) == (number, 3)
    with pytest.raises(InfeasibleError, match="looked at 3 times"):
        ledger.open(other(4), IDS, declared=3)
    assert ledger.open(other(2), IDS).number == 2, "what was opened may be looked up again"


def test_the_declaration_is_kept_and_cannot_change(ledger):
    ledger.open(other(1), IDS, declared=2)
    for number in (1, 3):
        with pytest.raises(ConfigError, match=f"declared 2 openings .* now {number}") as refusal:
            ledger.open(other(2), IDS, declared=number)
        assert refusal.value.exit_code == 2
    with pytest.raises(ConfigError, match="now 3"):
        ledger.open(other(1), IDS, declared=3)
    assert ledger.open(other(2), IDS).declared == 2


def test_one_opening_is_named_in_the_singular(ledger):
    ledger.open(CLAIM, IDS)
    with pytest.raises(ConfigError, match="declared 1 opening when"):
        ledger.open(CLAIM, IDS, declared=2)


@pytest.mark.parametrize("declared", [0, -1, 1.0, True])
def test_a_declaration_is_a_whole_number(ledger, declared):
    with pytest.raises(ConfigError, match="expected a whole number >= 1"):
        ledger.open(CLAIM, IDS, declared=declared)


def test_sets_that_share_a_prompt_are_counted_together(ledger):
    ledger.open(CLAIM, IDS)
    shared = [IDS[0], *FRESH]
    with pytest.raises(InfeasibleError, match="undeclared"):
        ledger.open(other(1), shared)
    with pytest.raises(InfeasibleError, match="openings declared is 1"):
        ledger.open(other(1), shared, declared=5)
    with pytest.raises(InfeasibleError, match="undeclared"):
        ledger.open(CLAIM, shared)  # the same claim on more prompts is optional stopping
    assert ledger.open(other(1), FRESH).number == 1


def test_an_overlap_within_what_both_declared_is_charged(ledger):
    ledger.open(other(1), IDS, declared=3)
    assert ledger.open(other(2), [IDS[0], *FRESH], declared=2).number == 2
    with pytest.raises(InfeasibleError, match="looked at 2 times"):
        ledger.open(other(3), IDS)


def test_an_audit_of_something_else_counts(ledger):
    ledger.record_look(other(7).look, IDS[:5])
    with pytest.raises(InfeasibleError, match=r"looked at 1 time before \(certificates: 0, audits that count: 1\)"):
        ledger.open(CLAIM, IDS)
    assert ledger.open(CLAIM, IDS, declared=2).number == 2


def test_an_audit_of_the_claim_itself_does_not_count(ledger):
    ledger.record_look(CLAIM.look, IDS)
    assert ledger.open(CLAIM, IDS).number == 1
    written = ledger.path.read_bytes()
    ledger.record_look(CLAIM.look, IDS)
    assert ledger.path.read_bytes() == written


@pytest.mark.parametrize("kind", ["finite_pool", "per_category", "strength"])
def test_an_audit_of_the_same_counts_where_more_can_be_chosen_after_it(ledger, kind):
    ledger.record_look(CLAIM.look, IDS)
    claim = replace(CLAIM, kind=kind)
    with pytest.raises(InfeasibleError, match="audits that count: 1"):
        ledger.open(claim, IDS)
    assert ledger.open(CLAIM, IDS, declared=3).number == 1
    assert ledger.open(claim, IDS).number == 3, "the audit counts beside the fixed certificate"


def test_an_audit_is_recognised_by_the_text_of_its_prompts(ledger):
    ledger.record_look(other(7).look, IDS, texts={name: f"text:{name}" for name in IDS})
    assert ledger.open(CLAIM, FRESH[1:], texts={FRESH[1]: "text:other"}).number == 1
    with pytest.raises(InfeasibleError, match="audits that count: 1"):
        ledger.open(CLAIM, FRESH[:1], texts={FRESH[0]: f"text:{IDS[5]}"})


def test_texts_are_added_to_a_look_that_was_entered_without_them(ledger):
    ledger.record_look(CLAIM.look, IDS)
    ledger.record_look(CLAIM.look, IDS, texts={IDS[0]: "text:x"})
    state = json.loads(ledger.path.read_text())
    assert (len(state["looks"]), state["texts"]) == (1, {IDS[0]: "text:x"})


def test_a_look_is_two_models_and_a_measure():
    base = ("b", "a", "nll_token", 0.1, 0.05, 8, SETTINGS)
    changed = [("c", *base[1:]), ("b", "c", *base[2:]), (*base[:2], "nll_sum", *base[3:]), (*base[:3], 0.2, *base[4:])]
    changed += [(*base[:4], 0.1, *base[5:]), (*base[:5], 4, SETTINGS)]
    other_ways = [("template", "none"), ("tokenizer", "before"), ("max_length", 64)]
    changed += [(*base[:6], SETTINGS | {name: value}) for name, value in other_ways]  # type: ignore[misc]
    assert len({look_sha256(*one) for one in [base, *changed]}) == 10
    same = replace(CLAIM, kind="strength", confidence=0.9, settings={"template": "chat", "pool": 5, "dtype": "auto"})
    assert same.look == CLAIM.look


def test_a_sequence_may_grow_at_its_end_only(ledger):
    claim = replace(CLAIM, kind="sequential")
    first = ledger.open(claim, IDS[:20], sequential=True)
    grown = ledger.open(claim, IDS[:30], sequential=True)
    assert (grown.number, grown.declared) == (first.number, first.declared) == (1, 1)
    assert ledger.open(claim, IDS[:30], sequential=True) == grown
    for changed in (IDS[1:31], [IDS[1], IDS[0], *IDS[2:40]], IDS[:25], [*IDS[:15], FRESH[0], *IDS[15:40]]):
        with pytest.raises(InfeasibleError, match="do not continue the 30"):
            ledger.open(claim, changed, sequential=True)
    assert ledger.open(claim, IDS, sequential=True).split_sha256 == split_sha256(IDS)
    assert ledger.find(claim.sha256, IDS[:20]) == first, "an earlier certificate of the sequence stays entered"
    assert ledger.find(claim.sha256, IDS[1:20]) is None


def test_a_sequence_that_grows_into_opened_prompts_is_refused(ledger):
    claim = replace(CLAIM, kind="sequential")
    ledger.open(claim, IDS, sequential=True)
    ledger.open(other(1), FRESH)
    with pytest.raises(InfeasibleError, match="undeclared"):
        ledger.open(claim, [*IDS, FRESH[0]], sequential=True)


def test_the_order_of_a_sequence_cannot_have_been_chosen_by_outcome(ledger):
    """Held prompts first, regressed ones last: any model would certify."""
    claim = replace(CLAIM, kind="sequential")
    ledger.record_look(claim.look, IDS)
    with pytest.raises(InfeasibleError, match="their order may depend on what was seen"):
        ledger.open(claim, IDS[::-1], sequential=True)
    ledger.open(CLAIM, FRESH, declared=3)
    with pytest.raises(InfeasibleError, match="their order may depend"):
        ledger.open(claim, FRESH[::-1], sequential=True)


def test_a_sequence_cannot_grow_by_prompts_that_were_audited(ledger):
    claim = replace(CLAIM, kind="sequential")
    ledger.open(claim, IDS[:30], sequential=True)
    ledger.record_look(claim.look, IDS[:30])
    assert ledger.open(claim, IDS[:40], sequential=True).number == 1, "what was in the sequence may be audited"
    ledger.record_look(claim.look, IDS)
    with pytest.raises(InfeasibleError, match="some of the last 20 of 60 prompts were looked at"):
        ledger.open(claim, [*IDS[:40], *IDS[:39:-1]], sequential=True)


def test_a_second_model_may_be_judged_on_the_same_sequence(ledger):
    first, second = (replace(other(n), kind="sequential") for n in (1, 2))
    ledger.open(first, IDS[:30], declared=2, sequential=True)
    assert ledger.open(second, IDS, declared=2, sequential=True).number == 2
    assert ledger.open(first, IDS[:40], sequential=True).number == 1


def test_a_prompt_with_another_completion_is_no_fresh_prompt(ledger):
    ledger.open(CLAIM, IDS, texts={name: f"text:{name}" for name in IDS})
    with pytest.raises(InfeasibleError, match="undeclared"):
        ledger.open(CLAIM, FRESH, texts={FRESH[0]: f"text:{IDS[5]}"})
    assert ledger.open(CLAIM, FRESH, texts={FRESH[0]: "text:other"}).number == 1


def test_a_fixed_opening_of_the_same_prompts_does_not_disturb_a_sequence(ledger):
    claim = replace(CLAIM, kind="sequential")
    order = IDS[::-1]
    ledger.open(claim, order, declared=2, sequential=True)
    ledger.open(CLAIM, IDS)
    assert ledger.open(claim, order, sequential=True).number == 1


@pytest.mark.parametrize("ids", [[], ["a", "a"]])
def test_prompts_must_be_there_and_differ(ledger, ids):
    with pytest.raises(DataError):
        ledger.open(CLAIM, ids)
    with pytest.raises(DataError):
        ledger.record_look(CLAIM.look, ids)


def damage(state: dict, how: str) -> object:
    if how == "version":
        return state | {"version": 3}
    if how == "ids":
        next(iter(state["splits"].values()))[0] = "x"
    elif how == "split":
        state["openings"][0]["split"] = "x"
    elif how == "declared":
        state["openings"][0]["declared"] = 0
    elif how == "sketch":
        state["sketches"][IDS[0]] = "no hashes"
    elif how == "closed":
        state["closed"] = [{"run": "r", "set": "s", "split": "x", "declared": 1}]
    elif how == "claim":
        del state["openings"][0]["claim"]
    else:
        del state["looks"]
    return state


@pytest.mark.parametrize(
    "how", ["version", "ids", "split", "declared", "claim", "looks", "list", "text", "sketch", "closed"]
)
def test_a_damaged_ledger_is_refused(ledger, how):
    ledger.open(CLAIM, IDS)
    state = json.loads(ledger.path.read_text())
    broken = {"list": "[]", "text": "{"}.get(how) or json.dumps(damage(state, how))
    ledger.path.write_text(broken, encoding="utf-8")
    with pytest.raises(CheckpointError) as refusal:
        ledger.open(CLAIM, IDS)
    assert str(ledger.path) in refusal.value.what


def test_where_the_ledger_lies(tmp_path, monkeypatch):
    safety = tmp_path / "safety.jsonl"
    safety.write_text("{}", encoding="utf-8")
    assert default_ledger(str(safety)) == tmp_path / "safety.jsonl.openings.json"
    cache = Path(os.environ["HOLDFAST_CACHE"]) / "openings" / "ledger.openings.json"
    assert default_ledger("owner/data") == cache
    monkeypatch.setattr("os.access", lambda *_: False)
    assert default_ledger(str(safety)).parent == tmp_path, "the place does not depend on what may be written"


def test_a_ledger_that_cannot_be_written_is_refused_before_anything_is_measured(ledger, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    for attempt in (ledger.check, ledger.open):
        with pytest.raises(ConfigError, match=r"ledger of openings .* cannot be written") as refusal:
            attempt(CLAIM, IDS)
        assert "--ledger" in refusal.value.remedy
    with pytest.raises(ConfigError, match="cannot be written"):
        ledger.record_look(CLAIM.look, IDS)


def test_a_ledger_of_version_1_is_read_and_written_anew(ledger, caplog):
    ledger.open(CLAIM, IDS, texts={name: f"text:{name}" for name in IDS})
    old = json.loads(ledger.path.read_text())
    del old["closed"], old["sketches"]
    ledger.path.write_text(json.dumps(old | {"version": 1}), encoding="utf-8")
    with caplog.at_level("INFO", logger="holdfast"):
        assert ledger.find(CLAIM.sha256, IDS) is not None
    assert "version 1: prompts entered so far are recognised by id and text alone" in caplog.text
    with pytest.raises(InfeasibleError, match="undeclared"):
        ledger.open(other(1), FRESH, texts={FRESH[0]: f"text:{IDS[5]}"})
    ledger.record_look(CLAIM.look, FRESH)
    state = json.loads(ledger.path.read_text())
    assert (state["version"], state["sketches"], state["closed"]) == (2, {}, [])
    assert state["openings"] == old["openings"]


def prompts(texts):
    return prompt_marks(make_example(text, "no") for text in texts)


TEXTS = [f"how does one find the number {i} in row {i * i} of this book" for i in range(9)]


@pytest.mark.parametrize("before", [True, False])
def test_a_prompt_with_words_before_it_is_no_fresh_prompt(ledger, before):
    first, second = prompts(TEXTS), prompts(f"kindly say {text}" for text in TEXTS)
    first, second = (first, second) if before else (second, first)
    assert not first.keys() & second.keys()
    ledger.open(CLAIM, list(first), texts=first)
    with pytest.raises(InfeasibleError, match="undeclared"):
        ledger.open(other(1), list(second), texts=second)
    fresh = prompts(f"{i} little ducks went {i} miles over the hill and {i} away" for i in range(9))
    assert ledger.open(other(1), list(fresh), texts=fresh).number == 1


def test_a_sequence_cannot_grow_by_prompts_that_were_nearly_audited(ledger):
    claim, first = replace(CLAIM, kind="sequential"), prompts(TEXTS[:4])
    ledger.open(claim, list(first), sequential=True, texts=first)
    ledger.record_look(claim.look, list(first), texts=first)
    audited = prompts(f"please {text}" for text in TEXTS[6:])
    ledger.record_look(claim.look, list(audited), texts=audited)
    more = first | prompts(TEXTS[4:6])
    assert ledger.open(claim, list(more), sequential=True, texts=more).number == 1
    more |= prompts(TEXTS[6:])
    with pytest.raises(InfeasibleError, match="last 3 of 9 prompts were looked at"):
        ledger.open(claim, list(more), sequential=True, texts=more)


def test_who_used_the_openings(ledger, tmp_path):
    assert ledger.used(IDS) == Used(0, None, ())
    ledger.close("runs/first", "safety", IDS, declared=3)
    assert ledger.used(IDS).count == 0, "to be closed is no look"
    ledger.open(other(1), IDS, declared=3)
    ledger.open(other(2), [*IDS[:5], *FRESH], label="evidence/second", declared=3)
    assert ledger.used(IDS) == Used(2, 3, ("runs/first", "evidence/second"))
    ledger.record_look(other(1).look, IDS)
    assert ledger.used(IDS).count == 2, "an audit that asked what an opening asked"
    ledger.record_look(other(3).look, FRESH[-3:])
    assert ledger.used(IDS).count == 2
    assert ledger.used(FRESH) == Used(2, 3, ("evidence/second", "an audit"))
    assert ledger.used(["z"], {"z": "text:z"}).count == 0


def test_a_share_is_closed_while_its_run_is_there_and_has_an_opening_left(ledger, tmp_path):
    run, texts = tmp_path / "run", prompts(TEXTS)
    ids = list(texts)
    ledger.close(str(run), "safety", ids[:6], declared=1, texts=texts)
    assert ledger.closed(ids, texts=texts) == []
    run.mkdir()
    assert ledger.closed(ids, texts=texts) == [Closed(str(run), tuple(sorted(ids[:6])), 1)]
    near = prompts(f"now {text}" for text in TEXTS[4:])
    assert [len(share.ids) for share in ledger.closed(list(near), texts=near)] == [2]
    ledger.close(str(run), "safety", ids[:3], declared=2, texts=texts)
    assert ledger.closed(ids, texts=texts) == [Closed(str(run), tuple(sorted(ids[:3])), 2)], "the later entry stands"
    written = ledger.path.read_bytes()
    ledger.close(str(run), "safety", ids[:3], declared=2, texts=texts)
    assert ledger.path.read_bytes() == written
    ledger.open(other(1), ids[:3], texts=texts, declared=2)
    assert ledger.closed(ids, texts=texts)
    ledger.open(other(2), ids[:3], texts=texts)
    assert ledger.closed(ids, texts=texts) == [], "nothing is left to spend"


def _open_one(path: str, number: int, results: multiprocessing.Queue) -> None:
    try:
        Ledger(Path(path)).open(other(number), IDS, declared=4)
        results.put(1)
    except InfeasibleError:
        results.put(0)


def test_two_processes_cannot_both_take_the_last_opening(ledger, tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_open_one, args=(str(ledger.path), n, results)) for n in range(12)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sum(results.get() for _ in workers) == 4
    assert len(json.loads(ledger.path.read_text())["openings"]) == 4
    assert list(tmp_path.iterdir()) == [ledger.path], "no lock and no temporary file is left"
