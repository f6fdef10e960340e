"""Opening a certify split: refused early, entered before measuring, counted by cluster, written without text."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests import tiny
from tests.unit.auditing.certifying import CONSTRAINT, STRONG, WEAK, Scene, scene, write_safety
from tests.unit.auditing.making import literal, plain, write_adapter

from holdfast.auditing import measures
from holdfast.auditing.certificate_spec import Setup
from holdfast.auditing.opening import open_certify
from holdfast.certification.binomial import p_value, upper_bound
from holdfast.certification.openings import Ledger
from holdfast.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HoldfastError,
    InfeasibleError,
    UnsupportedError,
)
from holdfast.data.encode import encode
from holdfast.data.examples import as_chat, make_example
from holdfast.records.certificate import load_certificate


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.auditing.issuing.commit", lambda: None)


def unmeasured(monkeypatch) -> None:
    """No weights may be used from here on."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("holdfast.auditing.pair.load_model", refuse)


def refused(made: Scene, error: type[HoldfastError], match: str, /, **options: object) -> HoldfastError:
    with pytest.raises(error, match=match) as refusal:
        made.certify(**options)
    assert not (made.output / "certificate.json").exists()
    assert not (made.output / "certificate.parquet").exists()
    return refusal.value


def test_counts_and_figures_are_those_of_a_literal_measurement(made):
    record = made.certify(constraint=replace(CONSTRAINT, tau=0.002))
    before, after = plain(made.base), plain(made.adapter, made.base)
    rows = tiny.rows(20, seed=3)
    encoded = [encode(as_chat(make_example(**row)), tiny.tokenizer(), max_length=None) for row in rows]
    slow = {item.id: literal(before, after, item, 8)["nll_token"] for item in encoded}
    table = pq.read_table(made.output / "certificate.parquet").to_pydict()
    assert table["id"] == sorted(slow)
    assert table["degradation"] == pytest.approx([slow[name] for name in table["id"]], abs=2e-6)
    k = sum(value > 0.002 for value in slow.values())
    assert 0 < k < 20
    assert table["violated"] == [slow[name] > 0.002 for name in table["id"]]
    assert (record.regressions, record.n, record.examples) == (k, 20, 20)
    assert record.p_value == p_value(k, 20, 0.2)
    assert record.upper_bound == upper_bound(k, 20, 0.95)
    assert record.certified == (record.p_value <= 0.05)
    assert record.certified_tau == sorted(table["degradation"])[19]  # the largest: none of 20 may regress at alpha 0.2
    assert record.noise_floor < 1e-5


def test_the_files_and_the_ledger(made):
    record = made.certify()
    assert record.certified
    assert load_certificate(made.output / "certificate.json") == record
    assert stat.S_IMODE((made.output / "certificate.parquet").stat().st_mode) == 0o600
    assert sorted(path.name for path in made.output.iterdir()) == ["certificate.json", "certificate.parquet"]
    ledger = Path(record.openings["ledger"])
    assert ledger == made.safety.with_name("safety.jsonl.openings.json")
    assert Ledger(ledger).find(
        record.openings["claim"], pq.read_table(made.output / "certificate.parquet")["id"].to_pylist()
    )
    assert record.statement.startswith("With 95 % confidence, at most 20 % of groups of near-duplicate prompts")
    assert "0.05 (nll_token)" in record.statement
    written = (made.output / "certificate.json").read_text() + ledger.read_text()
    for row in tiny.rows(20, seed=3):
        assert row["prompt"].strip() not in written
        assert row["completion"] not in written


def test_what_is_not_certified_says_so(tmp_path):
    record = scene(tmp_path, size=STRONG).certify()
    assert not record.certified
    assert record.statement.startswith("Not certified")
    assert record.upper_bound > 0.2
    assert record.certified_tau > 0.05


def test_too_few_prompts_are_refused_before_a_model_is_loaded(made, monkeypatch):
    write_safety(made.safety, tiny.rows(13, seed=3))
    unmeasured(monkeypatch)
    error = refused(made, InfeasibleError, "13 groups of near-duplicate prompts cannot certify")
    assert "14 are needed" in error.what
    assert not made.safety.with_name("safety.jsonl.openings.json").exists(), "a refusal is no opening"


def test_the_number_needed_grows_with_the_openings(made):
    error = refused(made, InfeasibleError, "20 groups of near-duplicate prompts cannot certify", openings=10)
    assert "24 are needed" in error.what


def test_near_duplicates_count_once_and_regress_together(made, tmp_path):
    rows = tiny.rows(20, seed=3)
    copies = [{"prompt": rows[0]["prompt"] + "!", "completion": f"w{i} w{i + 1} w5"} for i in range(5)]
    write_safety(made.safety, [*rows, *copies, rows[1]])
    record = made.certify()
    assert (record.examples, record.n) == (25, 20)
    found = pq.read_table(made.output / "certificate.parquet").to_pydict()
    assert len(set(found["cluster"])) == 20
    worst = {}
    for cluster, value in zip(found["cluster"], found["degradation"], strict=True):
        worst[cluster] = max(value, worst.get(cluster, -1))
    assert record.regressions == sum(value > 0.05 for value in worst.values())
    write_safety(made.safety, [*rows[:13], *copies])
    refused(
        made._replace(output=tmp_path / "b"),
        InfeasibleError,
        "13 groups of near-duplicate prompts cannot certify",
        ledger=tmp_path / "l",
    )


def test_a_nan_is_a_regression(made, monkeypatch):
    measured = measures.measure_pair  # type: ignore[attr-defined]

    def broken(*args: object, **kwargs: object):
        found = measured(*args, **kwargs)
        values = found.nll_after.copy()
        values[3] = np.nan
        return replace(found, nll_after=values)

    monkeypatch.setattr(measures, "measure_pair", broken)
    record = made.certify()
    assert record.regressions == 1
    assert record.certified_tau is None
    assert not record.certified


def test_the_opening_is_entered_before_anything_is_measured(made, monkeypatch):
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measures, "measure_pair", killed)
    with pytest.raises(KeyboardInterrupt):
        made.certify()
    assert not (made.output / "certificate.json").exists()
    monkeypatch.undo()
    monkeypatch.setenv("HOLDFAST_CACHE", str(made.output / "cache"))
    error = refused(made, InfeasibleError, "undeclared", constraint=replace(CONSTRAINT, tau=0.06))
    assert error.exit_code == 4
    assert made.certify().certified, "the same claim continues"


def test_an_undeclared_opening_is_refused_before_a_model_is_loaded(made, tmp_path, monkeypatch):
    made.certify()
    other = write_adapter(tmp_path / "other", made.base, size=WEAK, seed=9)
    unmeasured(monkeypatch)
    second = made._replace(adapter=other, output=tmp_path / "second")
    refused(second, InfeasibleError, "an undeclared opening never certifies")


def test_declared_openings_share_delta(made, tmp_path):
    first = made.certify(openings=2)
    other = write_adapter(tmp_path / "other", made.base, size=WEAK, seed=9)
    second = made._replace(adapter=other, output=tmp_path / "second").certify()
    assert (first.level, second.level) == (0.025, 0.025)
    assert (first.openings["this"], second.openings["this"]) == (1, 2)
    assert any("2 openings were declared" in line for line in second.assumptions)
    third = made._replace(output=tmp_path / "third")
    refused(third, ConfigError, "declared 2 openings", constraint=replace(CONSTRAINT, tau=0.06), openings=3)
    refused(third, InfeasibleError, "looked at 2 times", constraint=replace(CONSTRAINT, tau=0.06))


def test_the_same_question_is_answered_from_the_files(made, monkeypatch):
    record = made.certify()
    unmeasured(monkeypatch)
    assert made.certify() == record


def test_another_question_does_not_overwrite_a_certificate(made):
    made.certify(openings=2)
    written = (made.output / "certificate.json").read_bytes()
    with pytest.raises(ConfigError, match="a certificate of something else"):
        made.certify(constraint=replace(CONSTRAINT, tau=0.06))
    assert (made.output / "certificate.json").read_bytes() == written


def test_prompts_in_the_training_data_are_refused(made, tmp_path, monkeypatch):
    rows = tiny.rows(20, seed=3)
    train = write_safety(tmp_path / "train.jsonl", [{"prompt": f"please {rows[4]['prompt']} now", "completion": "w1"}])
    unmeasured(monkeypatch)
    error = refused(made, DataError, "1 of 20 certify prompts occur in the training data", train_data=[str(train)])
    assert rows[4]["prompt"].strip() not in str(error)


def test_training_data_may_have_the_columns_of_the_safety_data_or_the_usual_ones(made, tmp_path):
    rows = tiny.rows(20, seed=3)
    renamed = write_safety(tmp_path / "r.jsonl", [{"q": row["prompt"], "a": row["completion"]} for row in rows])
    setup = Setup(reading={"columns": {"prompt": "q", "completion": "a"}})
    for train in (renamed, made.safety):
        refused(made, DataError, "20 of 20 certify prompts", safety=str(renamed), setup=setup, train_data=[str(train)])


def test_training_data_has_columns_of_its_own(made, tmp_path):
    """The columns that are named are the ones that are searched, also where the file has the usual ones."""
    named = {"prompt": "question", "completion": "answer"}
    rows = tiny.rows(20, seed=3)
    usual = [row | {"question": "w9 w8", "answer": "w9"} for row in rows]
    mapped = [{"prompt": "w9 w8", "completion": "w9", "question": row["prompt"], "answer": "w9"} for row in rows]
    unlike = write_safety(tmp_path / "unlike.jsonl", usual)
    leaked = [str(unlike), str(write_safety(tmp_path / "leaked.jsonl", mapped))]
    refused(made, DataError, "20 of 20 certify prompts", train_data=leaked, train_columns=named)
    absent = {"prompt": "question", "completion": "reply"}
    error = refused(made, DataError, "expected columns reply", train_data=[str(unlike)], train_columns=absent)
    assert "--train-columns prompt=NAME" in error.remedy
    refused(made, ConfigError, "without train_data", train_columns=named)
    record = made.certify(train_data=[str(unlike)], train_columns=named)
    assert record.leakage == {"checked": True, "against": str(unlike), "prompts": 20}


def test_leakage_is_recorded(made, tmp_path):
    train = write_safety(tmp_path / "train.jsonl", tiny.rows(5, seed=99, start="w9"))
    record = made.certify(train_data=[str(train)])
    assert record.leakage == {"checked": True, "against": str(train), "prompts": 20}
    assert not any("assumed, not checked" in line for line in record.assumptions)
    unchecked = made._replace(output=tmp_path / "b").certify(ledger=tmp_path / "other.json")
    assert unchecked.leakage == {"checked": False, "against": None, "prompts": 0}
    assert any("assumed, not checked" in line for line in unchecked.assumptions)


def test_a_tau_inside_the_noise_is_refused_and_no_opening(made, monkeypatch):
    monkeypatch.setattr(measures, "noise_floor", lambda *_, **__: 0.02)
    refused(made, InfeasibleError, "inside the numerical noise")
    assert not made.safety.with_name("safety.jsonl.openings.json").exists()
    record = made.certify(constraint=replace(CONSTRAINT, allow_tau_below_noise=True))
    assert any("explicitly allowed" in line for line in record.assumptions)


def test_a_finite_pool_counts_prompts(made):
    record = made.certify(kind="finite_pool", pool=30)
    assert (record.kind, record.pool, record.n) == ("finite_pool", 30, 20)
    assert record.statement.startswith("With 95 % confidence, at most 20 % of the 30 listed prompts")
    assert any("without replacement from a list of 30" in line for line in record.assumptions)


def test_a_pool_smaller_than_the_sample_is_refused(made):
    refused(made, DataError, "n <= pool", kind="finite_pool", pool=19)
    refused(made, ConfigError, "expected a pool for finite_pool", kind="finite_pool")
    refused(made, ConfigError, "expected a pool for finite_pool", pool=30)
    refused(made, ConfigError, "kind 'fixd' is unknown", kind="fixd")


def test_categories_are_certified_together(made):
    rows = [row | {"category": "ab"[i % 2]} for i, row in enumerate(tiny.rows(40, seed=3))]
    write_safety(made.safety, rows)
    record = made.certify(kind="per_category")
    assert record.certified
    assert set(record.categories) == {"a", "b"}
    assert {entry["n"] for entry in record.categories.values()} == {20}
    assert record.p_value == max(entry["adjusted_p"] for entry in record.categories.values())
    assert "each of 2 categories" in record.statement


def test_categories_too_small_or_missing_are_refused(made):
    refused(made, DataError, "20 of 20 prompts have no category", kind="per_category")
    rows = [row | {"category": "a" if i < 25 else "b"} for i, row in enumerate(tiny.rows(40, seed=3))]
    write_safety(made.safety, rows)
    error = refused(
        made,
        InfeasibleError,
        "1 of 2 categories have too few groups of near-duplicate prompts, the smallest 15",
        kind="per_category",
    )
    assert "17" in error.what


def sequence(made: Scene, n: int, **options: object):
    write_safety(made.safety, tiny.rows(40, seed=3)[:n])
    return made.certify(kind="sequential", **options)


def test_a_sequence_grows_until_it_certifies(made, monkeypatch):
    measured: list[int] = []
    original = measures.measure_pair  # type: ignore[attr-defined]

    def counted(pair, encoded, **kwargs):
        measured.append(len(encoded["before"]))
        return original(pair, encoded, **kwargs)

    monkeypatch.setattr(measures, "measure_pair", counted)
    first = sequence(made, 5)
    assert (first.certified, first.n, first.p_value) == (False, 5, None)
    assert first.statement.startswith("Not certified yet")
    last = sequence(made, 40)
    assert measured == [5, 35], "what was measured before is not measured again"
    assert last.certified
    assert last.e_value >= 20
    assert last.sequential["certified_at"] <= 40
    assert last.openings["this"] == first.openings["this"] == 1
    table = pq.read_table(made.output / "certificate.parquet").to_pydict()
    assert table["id"] == [make_example(**row).id for row in tiny.rows(40, seed=3)], "in the order of the file"


def test_a_sequence_must_keep_its_start(made):
    sequence(made, 20)
    write_safety(made.safety, tiny.rows(40, seed=3)[1:30])
    with pytest.raises(InfeasibleError, match="do not continue the 20"):
        made.certify(kind="sequential")


def test_a_certified_sequence_is_taken_back_where_the_share_exceeds_alpha(made, monkeypatch):
    assert sequence(made, 30).certified
    monkeypatch.setattr(
        measures, "measure_pair", lambda pair, encoded, **_: type("M", (), {
            "degradation": lambda self, unit: np.full(len(encoded["before"]), 9.0)})()
    )  # fmt: skip
    record = sequence(made, 40)
    assert (record.regressions, record.certified) == (10, False), "25 % of what was measured is more than 20 %"


def test_near_copies_of_earlier_prompts_need_prompts_drawn_one_by_one(made):
    rows = tiny.rows(10, seed=3)
    copy = {"prompt": rows[2]["prompt"] + " !", "completion": "w7 w8"}
    write_safety(made.safety, [*rows, copy, rows[0]])
    refused(made, DataError, "1 of 11 prompts of the sequence nearly equal an earlier one", kind="sequential")
    assert made.certify(kind="sequential", drawn="rows").n == 11


@pytest.mark.parametrize("unit", ["kl_token", "kl_first"])
def test_other_units_are_certified(made, unit):
    record = made.certify(constraint=replace(CONSTRAINT, unit=unit))
    assert record.certified
    assert (record.by, record.unit) == ("kl", unit)
    assert any(f"({unit})" in line for line in record.assumptions)


def test_examples_in_memory_are_bound_by_content(made):
    found = [make_example(**row) for row in tiny.rows(20, seed=3)]
    ledger = made.output / "ledger.json"
    record = made.certify(safety=found, ledger=ledger)
    assert record.places["prompts"] is None
    other = [*found[:-1], make_example("w1 w2 w3 w4 w9 w8", "w3 w4")]
    second = made._replace(output=made.output / "b").certify(safety=other, ledger=made.output / "other.json")
    assert record.bound["data_sha256"] != second.bound["data_sha256"]


def test_a_damaged_certificate_in_the_output_is_not_trusted(made):
    made.certify()
    path = made.output / "certificate.json"
    path.write_bytes(path.read_bytes().replace(b'"certified": true', b'"certified": false'))
    with pytest.raises(CheckpointError):
        made.certify()


def test_a_text_example_needs_no_template(made):
    write_safety(made.safety, [{"text": f"w1 w{i} w{i + 1} w{i + 2} w{i + 3}"} for i in range(1, 41, 2)])
    with pytest.raises(DataError, match="cannot become a conversation"):
        made.certify()
    assert made.certify(setup=Setup(template="none")).examples == 20


def test_a_template_is_chat_or_none():
    with pytest.raises(ConfigError, match="template is 'yes'"):
        Setup(template="yes")


def test_what_cannot_be_measured_is_refused_before_the_opening(made, tmp_path):
    other = tiny.saved(tmp_path / "full", seed=4)
    with pytest.raises(UnsupportedError, match="no strength to scale"):
        open_certify(made.base, other, str(made.safety), CONSTRAINT, output=made.output, kind="strength")
    with pytest.raises(UnsupportedError, match="not defined across tokenizers"):
        made.certify(setup=Setup(tokenizer="own"), after=foreign(tmp_path))
    assert not made.safety.with_name("safety.jsonl.openings.json").exists(), "a refusal is no opening"


def foreign(folder: Path) -> Path:
    """A model that reads other tokens."""
    made = tiny.saved(folder / "foreign", seed=8)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["zz"])
    tokenizer.save_pretrained(made)
    return made
