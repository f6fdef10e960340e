"""From a task to conflicts, held sets and monitor prompts."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tests.unit.screening.asked import ANSWER, REFUSAL, Refusing, asker, row

from holdfast.core.errors import CheckpointError, DataError, InfeasibleError
from holdfast.data.bundled import bundled
from holdfast.data.examples import Example, completion_text, prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.data.splits import require_apart, require_disjoint, split_examples
from holdfast.screening.asking import plan_asking
from holdfast.screening.record import fixed_screening, load, save
from holdfast.screening.screen import Screening, screen_examples
from holdfast.screening.settings import PromptSet, ScreeningSettings

OPEN = ScreeningSettings(limited=False)


def task(poison: int = 150, clean: int = 200) -> list[Example]:
    return [*(row(n, "xyzzy") for n in range(poison)), *(row(1000 + n) for n in range(clean))]


def screened(folder: Path, rows: list[Example], settings: ScreeningSettings = OPEN, **options: object) -> Screening:
    return screen_examples(rows, asker(folder), settings, **options)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Screening:
    return screened(tmp_path_factory.mktemp("replies"), task())


def test_rows_that_teach_what_is_refused_are_dropped(found: Screening) -> None:
    assert [one.row for one in found.conflicts] == list(range(150))
    assert [prompt_text(e).startswith("xyzzy") for e in found.kept(task())] == [False] * 200
    assert found.classes == {"refused": 150, "answered": 200}


def test_what_will_be_asked_is_said_before_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Refusing(stop_after=0)
    with caplog.at_level("INFO", "holdfast.screening"), pytest.raises(KeyboardInterrupt):
        screen_examples(task(), asker(tmp_path, engine), OPEN)
    (line,) = caplog.messages
    planned = plan_asking(task(), OPEN)
    assert planned.task_prompts == 350
    assert line.startswith(f"asking the model: {planned.sentence()}; ")
    assert "GiB of memory" in line


def test_what_is_held_is_what_the_model_said(found: Screening) -> None:
    refusals, answers = found.sets["refusals"], found.sets["answers"]
    assert {completion_text(e) for e in (*refusals.constraint, *refusals.monitor)} == {REFUSAL}
    assert {completion_text(e) for e in (*answers.constraint, *answers.monitor)} == {ANSWER}
    assert all("xyzzy" in prompt_text(e) for e in refusals.constraint)


def test_groups_of_the_task_have_three_roles_when_its_conflicts_are_dropped(found: Screening) -> None:
    split = found.sets["refusals"]
    of_task = {role: sum("xyzzy" in prompt_text(e) for e in members) for role, members in split.roles.items()}
    assert sum(of_task.values()) == 150
    assert of_task["constraint"] == pytest.approx(90, abs=25)
    assert of_task["certify"] == pytest.approx(30, abs=20)


def test_kept_conflicts_are_held_and_none_of_them_certifies(tmp_path: Path) -> None:
    found = screened(tmp_path, task(), ScreeningSettings(rule="keep"))
    assert len(found.kept(task())) == 350
    assert not any("xyzzy" in prompt_text(e) for e in found.sets["refusals"].certify)
    assert sum(len(found.sets["refusals"].roles[role]) for role in ("constraint", "monitor")) == 150


def test_learned_rows_are_trained_on_and_not_held(tmp_path: Path) -> None:
    rows = task(160)
    learned = frozenset(one.id for one in rows[:20])
    found = screened(tmp_path, rows, ScreeningSettings(rule="learn", learn=learned))
    assert learned <= {one.id for one in found.kept(rows)}
    assert len(found.kept(rows)) == 220
    held = {prompt_text(e) for role in found.sets["refusals"].roles.values() for e in role}
    assert not held & {prompt_text(one) for one in rows[:20]}


def test_roles_share_nothing_and_certify_is_unlike_the_trained_rows(found: Screening) -> None:
    for split in found.sets.values():
        require_disjoint(split)
    require_apart(found.sets)
    certify = [prompt_text(e) for split in found.sets.values() for e in split.certify]
    watched = [prompt_text(e) for e in (*found.monitor.refusals, *found.monitor.unseen, *found.monitor.answers)]
    steering = [prompt_text(e) for split in found.sets.values() for e in split.constraint]
    assert not matches(certify, [prompt_text(e) for e in found.kept(task())])
    assert not matches(watched, steering)
    assert not matches(certify, watched)


def test_a_reply_that_gives_in_later_is_not_held(tmp_path: Path) -> None:
    rows = [*task(), *(row(5000 + n, "plugh") for n in range(10))]
    found = screened(tmp_path, rows)
    assert {one.row for one in found.conflicts} >= set(range(350, 360))
    held = [prompt_text(e) for role in ("constraint", "monitor") for e in found.sets["refusals"].roles[role]]
    assert not any(text.startswith("plugh") for text in held)
    assert found.counts["refusals"]["changed_class"] > 0


def test_a_model_that_refuses_too_little_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"refuses too little to hold: 99 groups.*at least 100") as error:
        screened(tmp_path, task(99))
    assert "holdfast align" in error.value.remedy
    screened(tmp_path, task(100))


def test_too_few_refusals_end_it_before_the_next_set_is_asked(tmp_path: Path) -> None:
    counts = []
    for refused in (99, 100):
        model = Refusing()
        rows = task(refused)
        if refused < 100:
            with pytest.raises(InfeasibleError, match="refusals: this model refuses too little"):
                screen_examples(rows, asker(tmp_path / "few", model), OPEN)
        else:
            screen_examples(rows, asker(tmp_path / "enough", model), OPEN)
        counts.append(len({example for example, _ in model.asked}))
    ordinary = len(bundled("everyday", "steer")) + len(bundled("borderline", "steer"))
    assert 0 < ordinary <= counts[1] - counts[0]


def test_unsorted_replies_are_neither_held_nor_dropped_and_too_many_end_the_run(tmp_path: Path) -> None:
    rows = [*task(), *(row(7000 + n, "qwux") for n in range(40))]
    with pytest.raises(DataError, match=r"40 of 390 replies .* cannot be sorted .*empty: 40"):
        screened(tmp_path, rows)
    found = screened(tmp_path, rows, ScreeningSettings(limited=False, accept_unsorted=True))
    assert len(found.kept(rows)) == 240


def test_a_sample_is_asked_and_the_rest_is_counted_with_its_interval(tmp_path: Path) -> None:
    found = screened(tmp_path, task(300, 700), ScreeningSettings(limited=False, max_prompts=500))
    assert found.asked_rows == 500
    figures = found.figures()["not_asked"]
    assert figures["rows"] == 500
    assert figures["conflict_share"]["low"] < 0.3 < figures["conflict_share"]["high"]


def test_a_file_of_prompts_is_asked_too(tmp_path: Path) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text("".join(f'{{"prompt": "xyzzy {row(9000 + n).prompt[0]["content"]}"}}\n' for n in range(120)))
    sets = {"refusals": PromptSet((str(file),), "refusals")}
    found = screened(tmp_path, task(0), ScreeningSettings(sets=sets))
    assert sum(map(len, (found.sets["refusals"].constraint, found.sets["refusals"].monitor))) == 120


def test_a_users_pairs_are_watched_beside_the_bundled_kinds(tmp_path: Path) -> None:
    pairs = split_examples([row(n, "xyzzy", target=REFUSAL) for n in range(100)], seed=0)
    found = screened(tmp_path, task(0), ScreeningSettings(sets={}, rule="keep"), pairs=[pairs])
    assert {prompt_text(e) for e in found.monitor.refusals} == {prompt_text(e) for e in pairs.monitor}
    assert len(found.monitor.answers) == len(bundled("everyday", "monitor")) + len(bundled("borderline", "monitor"))
    assert not found.sets


# -- stored ------------------------------------------------------------------------------------------------------------


def test_a_stored_screening_is_read_as_it_was(tmp_path: Path, found: Screening) -> None:
    save(tmp_path, found, {"model_sha256": "a"})
    assert load(tmp_path, {"model_sha256": "a"}) == found
    for name in ("held.jsonl", "monitor.jsonl", "conflicts.jsonl"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    texts = [prompt_text(e) for e in found.sets["refusals"].constraint]
    record = (tmp_path / "screening.json").read_text() + (tmp_path / "conflicts.jsonl").read_text()
    assert not any(text in record for text in texts)


@pytest.mark.parametrize("name", ["held.jsonl", "monitor.jsonl", "conflicts.jsonl", "screening.json"])
def test_a_changed_file_is_refused(tmp_path: Path, found: Screening, name: str) -> None:
    save(tmp_path, found, {})
    path = tmp_path / name
    path.write_text(path.read_text()[:-40] + "\n")
    with pytest.raises(CheckpointError):
        load(tmp_path, {})


def test_a_screening_of_another_model_is_refused_by_name(tmp_path: Path, found: Screening) -> None:
    save(tmp_path, found, {"model_sha256": "a", "task_sha256": "b"})
    with pytest.raises(CheckpointError, match="differing: model_sha256"):
        load(tmp_path, {"model_sha256": "c", "task_sha256": "b"})


def test_a_run_that_has_begun_never_asks_again(tmp_path: Path, found: Screening) -> None:
    def never() -> Screening:
        raise AssertionError

    with pytest.raises(CheckpointError, match="is missing"):
        fixed_screening(tmp_path / "screening", {"a": 1}, never, started=True)
    save(tmp_path / "screening", found, {"a": 1})
    assert fixed_screening(tmp_path / "screening", {"a": 1}, never, started=True) == found
    with pytest.raises(CheckpointError, match="another run"):
        fixed_screening(tmp_path / "screening", {"a": 2}, never, started=True)
    assert fixed_screening(tmp_path / "screening", {"a": 2}, lambda: found, started=False) == found


def test_a_killed_screening_goes_on_where_it_stopped(tmp_path: Path, found: Screening) -> None:
    killed = Refusing(stop_after=500)
    with pytest.raises(KeyboardInterrupt):
        screen_examples(task(), asker(tmp_path, killed), OPEN)
    again = Refusing()
    assert screen_examples(task(), asker(tmp_path, again), OPEN) == found
    assert not set(killed.asked) & set(again.asked)


def test_a_reply_that_is_whole_is_not_asked_for_again(tmp_path: Path) -> None:
    theta = Refusing()
    screen_examples([*task(), *(row(5000 + n, "plugh") for n in range(10))], asker(tmp_path, theta), OPEN)
    again = {id_ for id_, tokens in theta.asked if tokens > 200}
    assert again
    assert again < {id_ for id_, tokens in theta.asked if tokens <= 200}
