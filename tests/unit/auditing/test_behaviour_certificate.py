"""A certificate of what the models do: what before refused and after does not, counted in groups and in prompts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests import behaving

from holdfast.auditing import asking
from holdfast.auditing.opening import open_certify
from holdfast.auditing.verify import verify
from holdfast.certification.behaviour import Claimed, assessed
from holdfast.certification.binomial import p_value, upper_bound
from holdfast.certification.terms import Terms, named_statement
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import CheckpointError, ConfigError, InfeasibleError, UnsupportedError
from holdfast.data.sources import read_prompts
from holdfast.records.certificate import load_certificate
from holdfast.records.certificate_table import read_stored, write_table

ALPHA = 0.05


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("behaving")
    margins = {
        "before": {}, "kept": {"margin": behaving.KEPT}, "gone": {"margin": behaving.AFTER},
        "some": {"margin": behaving.KEPT, "weak": behaving.LOST},
    }  # fmt: skip
    return {name: behaving.saved(folder / name, **how) for name, how in margins.items()}


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write(tmp_path / "prompts.jsonl", behaving.rows(80, weak=8))


@pytest.fixture(scope="module")
def issued(models, tmp_path_factory) -> Path:
    """A certificate that is copied, to be edited."""
    folder = tmp_path_factory.mktemp("issued")
    certify(models, "kept", write(folder / "prompts.jsonl", behaving.rows(80, weak=8)), folder / "out")
    return folder / "out"


def write(path: Path, rows: list[dict[str, str]], *, completions: bool = False) -> Path:
    kept = rows if completions else [{"prompt": row["prompt"]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return path


def certify(models, after: str, prompts: Path, output: Path, **options):
    limit = ChanceConstraint(alpha=options.pop("alpha", ALPHA), unit="nll_token")
    given = {"by": "behaviour", "max_new_tokens": 16} | options
    return open_certify(models["before"], models[after], str(prompts), limit, output=output, **given)


def test_kept_refusals_certify_and_verify(models, prompts, tmp_path):
    record = certify(models, "kept", prompts, tmp_path / "out")
    assert record.certified
    assert (record.n, record.regressions) == (80, 0)
    assert record.groups["p_value"] == p_value(0, 80, ALPHA)
    assert record.upper_bound == upper_bound(0, 80)
    seen = record.behaviour
    assert (seen["prompts"], seen["counted"], seen["lost"]) == (80, {"refusals": 80}, {"refusals": 0})
    assert (seen["unclear"], seen["flips"]) == (0, {"refusals": 0})
    for name in ("before", "kept"):
        assert str(models[name]) in record.statement
    assert record.bound["after_sha256"][:12] in record.statement
    assert "float32" in record.statement
    assert verify(tmp_path / "out") == record


def test_lost_refusals_do_not_certify_though_their_likelihood_passes(models, tmp_path):
    """A10: at most 0.1 nats a token are lost on every refusal, and not one is given any more."""
    pairs = write(tmp_path / "pairs.jsonl", behaving.rows(80), completions=True)
    likely = certify(models, "gone", pairs, tmp_path / "likely", by="likelihood", openings=2)
    assert likely.certified
    assert "stop refusing" in likely.statement
    record = certify(models, "gone", pairs, tmp_path / "out", openings=2)
    assert not record.certified
    assert (record.n, record.regressions) == (80, 80)


def test_the_lost_are_counted_one_by_one(models, prompts, tmp_path):
    record = certify(models, "some", prompts, tmp_path / "out")
    assert (record.regressions, record.n) == (8, 80)
    assert record.groups["p_value"] == p_value(8, 80, ALPHA)
    assert not record.certified


def test_answers_are_a_second_claim_at_half_the_level(models, tmp_path):
    rows = [*behaving.rows(80), *behaving.rows(90, seed=1, trigger=False)]
    prompts = write(tmp_path / "prompts.jsonl", rows)
    record = certify(models, "kept", prompts, tmp_path / "out", also=["answers"])
    assert record.certified
    assert record.behaviour["counted"] == {"refusals": 80, "answers": 90}
    assert (record.also["n"], record.also["regressions"]) == (90, 0)
    assert record.upper_bound == upper_bound(0, 80, parts=2)
    assert record.also["upper_bound"] == upper_bound(0, 90, parts=2)
    assert "refused" in record.statement
    assert "answered" in record.statement
    assert verify(tmp_path / "out") == record


def test_a_model_that_refuses_too_little_is_refused_before_the_opening(models, tmp_path):
    rows = [*behaving.rows(58), *behaving.rows(40, seed=1, trigger=False)]
    prompts = write(tmp_path / "prompts.jsonl", rows)
    told: list[tuple[int, int]] = []
    with pytest.raises(InfeasibleError, match="refused 24 of 64 prompts so far") as refused:
        certify(models, "kept", prompts, tmp_path / "out", progress=lambda *row: told.append(row))
    assert "Even if it refused all 34 others: 58 groups of near-duplicate" in refused.value.what
    assert "59 are needed" in refused.value.what
    assert told[-1] == (64, 3 * 98), "shorter prompts come first: after two batches, 40 of 98 were answered"
    assert not (tmp_path / "prompts.jsonl.openings.json").exists()
    assert [file.name for file in (tmp_path / "out" / "replies").iterdir()] == ["before.jsonl"]


def test_the_count_is_looked_at_a_few_times_a_pass(models, tmp_path, monkeypatch):
    """Not after every reply of an engine that gives them one by one."""
    monkeypatch.setattr(asking, "LOOKS", 1)
    prompts = write(tmp_path / "prompts.jsonl", [*behaving.rows(58), *behaving.rows(40, seed=1, trigger=False)])
    with pytest.raises(InfeasibleError, match="refused 58 of 98 prompts: 58 groups"):
        certify(models, "kept", prompts, tmp_path / "out")
    assert not (tmp_path / "out" / "replies" / "again.jsonl").exists()


def test_prompts_added_after_an_early_end_are_asked_with_the_replies_that_are_there(models, tmp_path):
    """The early end was no look: the same prompts and more of them certify at their first opening."""
    rows = [*behaving.rows(58), *behaving.rows(40, seed=1, trigger=False)]
    for more in (0, 20):
        prompts = write(tmp_path / "prompts.jsonl", [*rows, *behaving.rows(more, seed=2)])
        if not more:
            for _ in range(2):  # the second start knows at once
                with pytest.raises(InfeasibleError, match="refused 24 of 64 prompts so far"):
                    certify(models, "kept", prompts, tmp_path / "out")
    record = certify(models, "kept", prompts, tmp_path / "out")
    assert record.certified
    assert (record.n, record.openings["this"], record.openings["declared"]) == (78, 1, 1)
    assert verify(tmp_path / "out") == record


def test_a_reply_that_is_not_certain_yet_ends_nothing(models, prompts, tmp_path):
    """Cut at 4 tokens all 80 refusals are unsorted; asked once more they are refusals."""
    assert certify(models, "kept", prompts, tmp_path / "out", max_new_tokens=4).behaviour["counted"] == {"refusals": 80}


def test_every_phase_of_asking_says_what_and_how_many(models, tmp_path, caplog):
    prompts = write(tmp_path / "prompts.jsonl", [*behaving.rows(80), *behaving.rows(9, seed=1, trigger=False)])
    caplog.set_level("INFO", logger="holdfast")
    certify(models, "kept", prompts, tmp_path / "out", max_new_tokens=4)
    who = ("the model before", "the model before again, in other batches", "the model after")
    asked = [line for line in caplog.messages if line.startswith("asking ")]
    assert asked == [
        f"asking {name}: {what} tokens each"
        for name in who
        for what in ("89 prompts, at most 4", "80 cut replies once more, at most 16")
    ]
    (tmp_path / "out" / "certificate.json").unlink()
    certify(models, "kept", prompts, tmp_path / "out", max_new_tokens=4)
    assert "asking for 89 of 89 replies of an earlier start again" in caplog.messages


def test_replies_that_rounding_decides_are_refused_before_the_opening(models, prompts, tmp_path, monkeypatch):
    seen = asking.Asked.classes

    def flipping(self, name, **how):
        found = seen(self, name, **how)
        return [*(["answered"] * 2), *found[2:]] if how.get("again") else found

    monkeypatch.setattr(asking.Asked, "classes", flipping)
    with pytest.raises(InfeasibleError, match="2 of 80 prompts were refused by the model before at one") as refused:
        certify(models, "kept", prompts, tmp_path / "out")
    assert "float32" in refused.value.remedy
    assert not (tmp_path / "prompts.jsonl.openings.json").exists()


def leave_unsorted(monkeypatch, of: str, count: int) -> None:
    """The first `count` replies of one of the models cannot be sorted."""
    seen = asking.Asked.classes

    def unsorted(self, name, **how):
        found = seen(self, name, **how)
        return [*(["unsorted"] * count), *found[count:]] if name == of else found

    monkeypatch.setattr(asking.Asked, "classes", unsorted)


def test_too_many_unclear_replies_of_both_models_certify_nothing(models, prompts, tmp_path, monkeypatch):
    leave_unsorted(monkeypatch, "before", 8)
    leave_unsorted(monkeypatch, "after", 9)
    record = certify(models, "kept", prompts, tmp_path / "out")
    assert not record.certified
    assert "9 of 80 prompts (11.2 %) could not be sorted" in record.statement


def test_too_many_unsorted_replies_before_end_it_before_the_opening(models, prompts, tmp_path, monkeypatch):
    """As many as are allowed are opened; one more could never certify, whatever the model after says."""
    with monkeypatch.context() as patch:
        leave_unsorted(patch, "before", 9)
        with pytest.raises(InfeasibleError, match="9 of 80 replies of the model before can be sorted neither") as ended:
            certify(models, "kept", prompts, tmp_path / "out")
    assert ended.value.exit_code == 4
    assert "opened nothing" in ended.value.remedy
    assert not (tmp_path / "prompts.jsonl.openings.json").exists()
    assert not (tmp_path / "out" / "certificate.json").exists()
    leave_unsorted(monkeypatch, "before", 8)
    record = certify(models, "kept", prompts, tmp_path / "out")
    assert record.certified
    assert (record.behaviour["unclear"], record.openings["this"]) == (8, 1)


def test_unsorted_replies_end_the_asking_where_they_are_too_many(models, tmp_path, monkeypatch):
    """All answers are made unsorted here; being shorter, they come before all 79 prompts were asked."""
    real = asking.class_of

    def class_of(reply):
        return "unsorted" if behaving.ANSWER in reply.text else real(reply)

    monkeypatch.setattr(asking, "class_of", class_of)
    prompts = write(tmp_path / "prompts.jsonl", [*behaving.rows(70), *behaving.rows(9, seed=1, trigger=False)])
    with pytest.raises(InfeasibleError, match="of the model before can be sorted neither") as ended:
        certify(models, "kept", prompts, tmp_path / "out")
    assert "so far" in ended.value.what
    assert [file.name for file in (tmp_path / "out" / "replies").iterdir()] == ["before.jsonl"]
    assert not (tmp_path / "prompts.jsonl.openings.json").exists()


def test_an_unsorted_reply_after_is_lost(models, prompts, tmp_path, monkeypatch):
    seen = asking.Asked.classes

    def unsorted(self, name, **how):
        found = seen(self, name, **how)
        return ["unsorted", *found[1:]] if name == "after" else found

    monkeypatch.setattr(asking.Asked, "classes", unsorted)
    record = certify(models, "kept", prompts, tmp_path / "out")
    assert record.regressions == 1
    assert record.behaviour["unclear"] == 1


def test_a_cut_reply_is_asked_for_at_four_times_the_length(models, prompts, tmp_path):
    told: list[tuple[int, int]] = []
    record = certify(
        models, "kept", prompts, tmp_path / "out", max_new_tokens=4, progress=lambda *row: told.append(row)
    )
    assert told[-1] == (2 * 3 * 80, 2 * 3 * 80), "every reply is asked for twice, and both are told of"
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (tmp_path / "out" / "replies" / "before.longer.jsonl").is_file()
    assert record.certified, "the refusal of nine words ends within 16 tokens"
    with pytest.raises(InfeasibleError, match="refused 0 of 32 prompts so far"):  # cut at 8 tokens
        certify(models, "kept", prompts, tmp_path / "short", max_new_tokens=2, ledger=tmp_path / "ledger.json")
    assert verify(tmp_path / "out") == record


def test_a_killed_certificate_goes_on_with_the_replies_it_has(models, prompts, tmp_path, monkeypatch):
    whole = certify(models, "some", prompts, tmp_path / "whole", ledger=tmp_path / "a.json")
    real, calls = asking.replies, []  # type: ignore[attr-defined]

    def killed(path, header, examples, engine, **how):
        calls.append(path.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(path, header, examples, engine, **how)

    monkeypatch.setattr(asking, "replies", killed)
    with pytest.raises(KeyboardInterrupt):
        certify(models, "some", prompts, tmp_path / "out", ledger=tmp_path / "b.json")
    monkeypatch.setattr(asking, "replies", real)
    before = (tmp_path / "out" / "replies" / "before.jsonl").stat().st_mtime_ns
    record = certify(models, "some", prompts, tmp_path / "out", ledger=tmp_path / "b.json")
    assert (tmp_path / "out" / "replies" / "before.jsonl").stat().st_mtime_ns == before
    assert (record.bound["table_sha256"], record.regressions) == (whole.bound["table_sha256"], whole.regressions)


def test_forged_replies_that_lie_there_before_the_start_are_not_used(models, prompts, tmp_path):
    """Whoever may write to the output can compute the header of the store; the replies are asked for again."""
    seen = certify(models, "some", prompts, tmp_path / "seen", ledger=tmp_path / "a.json")
    folder = tmp_path / "out" / "replies"
    folder.mkdir(parents=True)
    for name in ("before", "again"):
        (folder / f"{name}.jsonl").write_bytes((tmp_path / "seen" / "replies" / f"{name}.jsonl").read_bytes())
    after = (tmp_path / "seen" / "replies" / "after.jsonl").read_text(encoding="utf-8")
    forged = after.replace(behaving.ANSWER, behaving.REFUSAL, 1)
    assert forged != after
    (folder / "after.jsonl").write_text(forged, encoding="utf-8")
    record = certify(models, "some", prompts, tmp_path / "out", ledger=tmp_path / "b.json")
    assert record.regressions == seen.regressions == 8
    assert any("left by an earlier start" in line for line in record.assumptions), "those of the model before agreed"


def forge(folder: Path, **changes) -> None:
    """Every class after is refused, and table and certificate fit one another; the replies are gone."""
    record = load_certificate(folder / "certificate.json")
    table = read_stored(record, folder)
    table = replace(table, after=["refused"] * len(table.ids))
    bound = record.bound | {"table_sha256": write_table(folder / "certificate.parquet", table, record.tau)}
    terms = Terms("fixed", record.tau, record.alpha, record.confidence, 1, None, record.unit)
    found = assessed(table, terms, (Claimed.REFUSALS,))
    found["behaviour"] = record.behaviour | found["behaviour"]
    found["statement"] = named_statement(found["statement"], record.by, record.models, bound, found["behaviour"])
    replace(record, bound=bound, **found).save(folder)
    shutil.rmtree(folder / "replies")


def test_a_table_and_a_certificate_forged_together_are_refused(models, prompts, tmp_path):
    """The ledger keeps a hash of what the opening came to."""
    assert not certify(models, "some", prompts, tmp_path / "out").certified
    forge(tmp_path / "out")
    assert load_certificate(tmp_path / "out" / "certificate.json").certified
    with pytest.raises(CheckpointError, match="came to something else"):
        verify(tmp_path / "out")
    with pytest.raises(CheckpointError, match="came to something else"):
        certify(models, "some", prompts, tmp_path / "out")


@pytest.mark.parametrize(
    ("block", "change"),
    [
        ("behaviour", {"rules": {"name": "another judge", "revision": "9"}}),
        ("behaviour", {"max_new_tokens": 4096}),
        ("behaviour", {"rules": {}}),
        ("settings", {"replies": {}}),
        ("settings", {"reading": {"limit": "x"}}),
        ("bound", {"replies_sha256": {}}),
        ("bound", {"replies_sha256": None}),
        ("places", {"prompts": "x" * 5000}),
        ("openings", {"ledger": "x" * 5000}),
        ("openings", {"declared": 10**400}),
    ],
)
def test_a_certificate_edited_with_its_hash_is_refused_without_a_traceback(issued, tmp_path, block, change):
    shutil.copytree(issued, tmp_path / "out")
    record = verify(tmp_path / "out")
    replace(record, **{block: getattr(record, block) | change}).save(tmp_path / "out")
    with pytest.raises(CheckpointError):
        verify(tmp_path / "out")


def test_a_category_without_a_refusal_is_not_left_out(models, tmp_path):
    rows = [row | {"category": "a"} for row in behaving.rows(80)]
    rows += [row | {"category": "b"} for row in behaving.rows(80, seed=1, trigger=False)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(InfeasibleError, match="1 of 2 categories have too few"):
        certify(models, "kept", path, tmp_path / "out", kind="per_category")


def test_conversations_that_differ_in_a_turn_are_different_prompts(tmp_path):
    user = [{"role": "user", "content": "w"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "v"}]
    system = [{"role": "system", "content": "w"}, {"role": "user", "content": "v"}]
    rows = [{"prompt": turns, "completion": [{"role": "assistant", "content": "x"}]} for turns in (user, system, user)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert len(read_prompts(str(path))) == 2


def test_replies_are_for_their_owner_and_bound(models, prompts, tmp_path):
    record = certify(models, "kept", prompts, tmp_path / "out")
    replies = tmp_path / "out" / "replies" / "after.jsonl"
    assert replies.stat().st_mode & 0o777 == 0o600
    text = replies.read_text(encoding="utf-8")
    replies.write_text(text.replace("can't", "can", 1), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"after\.jsonl"):
        verify(tmp_path / "out")
    for file in replies.parent.iterdir():
        file.unlink()
    replies.parent.rmdir()
    assert verify(tmp_path / "out") == record, "a certificate is passed on without its replies"


def test_the_same_question_is_answered_from_the_files(models, prompts, tmp_path, monkeypatch):
    record = certify(models, "kept", prompts, tmp_path / "out")
    monkeypatch.setattr(asking.Asked, "classes", lambda *_, **__: pytest.fail("asked again"))
    assert (
        certify(models, "kept", prompts, tmp_path / "out")
        == record
        == load_certificate(tmp_path / "out" / "certificate.json")
    )


def test_a_model_compared_with_itself_is_refused(models, prompts, tmp_path):
    with pytest.raises(ConfigError, match="the same model"):
        certify(models, "before", prompts, tmp_path / "out")


@pytest.mark.parametrize("kind", ["sequential", "strength", "finite_pool"])
def test_kinds_that_need_the_number_of_refusals_first_are_refused(models, prompts, tmp_path, kind):
    pool = {"pool": 500} if kind == "finite_pool" else {}
    with pytest.raises(UnsupportedError, match="by behaviour"):
        certify(models, "kept", prompts, tmp_path / "out", kind=kind, **pool)


def test_near_duplicates_are_one_unit_and_every_row_counts(models, tmp_path):
    """A1 by behaviour: one large group is lost. 1 of 71 groups would certify, 30 of 100 prompts never do."""
    rows = behaving.rows(71, weak=1)
    twins = [{"prompt": f"{rows[0]['prompt']} {word}"} for word in behaving.WORDS[:29]]
    record = certify(models, "some", write(tmp_path / "p.jsonl", [*rows, *twins]), tmp_path / "out", alpha=0.1)
    assert (record.groups["n"], record.groups["regressions"]) == (71, 1)
    assert (record.rows["n"], record.rows["regressions"]) == (100, 30)
    assert not record.certified
