"""A set that keeps answers may hold theta_0's own answers to probes: those of the kinds for steering, and no others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.unit.screening.asked import ANSWER, REFUSAL, Refusing, asker, row

from holdfast.data.bundled import KINDS, USES, bundled
from holdfast.data.examples import Example, completion_text, prompt_text
from holdfast.data.near_duplicates import matches
from holdfast.data.splits import Split, require_apart, require_disjoint
from holdfast.runs.stages.certifiable import asked_note, bundled_share
from holdfast.screening.asking import planned
from holdfast.screening.screen import Screening, screen_examples
from holdfast.screening.settings import AUTO, PromptSet, ScreeningSettings, uses_of

ANSWERS = PromptSet(("everyday", "borderline", "probes"), "answers")
WITH_PROBES = ScreeningSettings(limited=False, sets={**AUTO, "answers": ANSWERS})
PROBES = {prompt_text(e): e for e in bundled("probes")}
USE = {text: KINDS["probes"][str(e.category)] for text, e in PROBES.items()}


@dataclass
class Half(Refusing):
    """Refuses probes of even length, says nothing to every ninth, and answers the others."""

    @staticmethod
    def reply(prompt: str, tokens: int) -> str:
        if prompt not in PROBES:
            return Refusing.reply(prompt, tokens)
        if len(prompt) % 9 == 0:
            return ""
        return REFUSAL if len(prompt) % 2 == 0 else ANSWER


def task() -> list[Example]:
    return [*(row(n, "xyzzy") for n in range(60)), *(row(1000 + n) for n in range(100))]


def screened(folder: Path, settings: ScreeningSettings, engine: Half | None = None) -> Screening:
    return screen_examples(task(), asker(folder, engine or Half()), settings)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Screening:
    return screened(tmp_path_factory.mktemp("replies"), WITH_PROBES)


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Screening:
    return screened(tmp_path_factory.mktemp("replies"), ScreeningSettings(limited=False))


def probes(split: Split, role: str) -> list[str]:
    return [text for text in map(prompt_text, split.roles[role]) if text in PROBES]


def test_answers_are_held_and_refusals_stay_with_the_refusals(found: Screening) -> None:
    for role in ("constraint", "monitor"):
        answered, refused = (probes(found.sets[name], role) for name in ("answers", "refusals"))
        assert len(answered) > 20
        assert len(refused) > 20
        assert all(len(text) % 2 == 1 and len(text) % 9 for text in answered)
        assert all(len(text) % 2 == 0 and len(text) % 9 for text in refused)
    replies = {
        role: {completion_text(e) for e in found.sets["answers"].roles[role]} for role in ("constraint", "monitor")
    }
    assert replies == {"constraint": {ANSWER}, "monitor": {ANSWER}}


def test_no_probe_of_another_kind_steers_or_is_like_one_that_does(found: Screening) -> None:
    steering = [
        text for split in found.sets.values() for role in ("constraint", "monitor") for text in probes(split, role)
    ]
    assert {USE[text] for text in steering} == {"steer"}
    constraint = [prompt_text(e) for split in found.sets.values() for e in split.constraint]
    kept_out = [prompt_text(e) for e in (*found.monitor.refusals, *found.monitor.unseen, *found.monitor.answers)]
    kept_out += [prompt_text(e) for split in found.sets.values() for e in split.certify]
    assert {USE.get(text) for text in kept_out} >= {"monitor", "certify"}
    assert not matches(kept_out, constraint)
    for split in found.sets.values():
        require_disjoint(split)
    require_apart(found.sets)


def test_whether_a_probe_is_still_answered_is_neither_watched_nor_certified(
    found: Screening, without: Screening
) -> None:
    assert not any(prompt_text(e) in PROBES for e in found.monitor.answers)
    assert probes(found.sets["answers"], "certify") == []
    assert {USE[prompt_text(e)] for e in found.monitor.unseen} == {"monitor"}
    assert {USE[text] for text in probes(found.sets["refusals"], "certify")} == {"certify"}
    # What is like a steering prompt is kept out, and more prompts steer: nothing is added by it.
    assert set(probes(found.sets["refusals"], "certify")) <= set(probes(without.sets["refusals"], "certify"))


def test_groups_are_shared_out_as_those_of_other_kinds(found: Screening) -> None:
    steering = [e for e in bundled("probes", "steer") if len(prompt_text(e)) % 2 and len(prompt_text(e)) % 9]
    counts = found.counts["answers"]["sources"]["probes"]
    assert counts == {"asked": len(bundled("probes", "steer")), "kept": len(steering)}
    held = {role: len(probes(found.sets["answers"], role)) for role in ("constraint", "monitor")}
    assert held["constraint"] / sum(held.values()) == pytest.approx(0.75, abs=0.12)
    assert not probes(found.sets["answers"], "certify")


def test_it_asks_nothing_more_than_refusals_do(tmp_path: Path) -> None:
    sorting = []
    for name, settings in (("with", WITH_PROBES), ("without", ScreeningSettings(limited=False))):
        engine = Half()
        screened(tmp_path / name, settings, engine)
        assert max(Counter(engine.asked).values()) == 1
        sorting.append({key for key, tokens in engine.asked if tokens == 32})
        assert planned(160, 160, 160, settings).bundled_prompts + 160 == len(sorting[-1])
    assert sorting[0] == sorting[1]


def test_the_order_of_the_sets_changes_nothing(found: Screening, tmp_path: Path) -> None:
    turned = ScreeningSettings(limited=False, sets={"answers": ANSWERS, "refusals": AUTO["refusals"]})
    other = screened(tmp_path, turned)
    for name, split in found.sets.items():
        assert {role: [e.id for e in members] for role, members in other.sets[name].roles.items()} == {
            role: [e.id for e in members] for role, members in split.roles.items()
        }


def test_answers_to_probes_alone_are_watched_by_ordinary_prompts(tmp_path: Path) -> None:
    alone = ScreeningSettings(limited=False, sets={"mine": PromptSet(("probes",), "answers")})
    found = screened(tmp_path, alone)
    assert {USE[text] for role in ("constraint", "monitor") for text in probes(found.sets["mine"], role)} == {"steer"}
    assert found.sets["mine"].certify == ()
    assert found.monitor.answers
    assert {USE[prompt_text(e)] for e in found.monitor.unseen} == {"monitor"}


def test_only_answered_probes_leave_kinds_out_and_it_is_no_default() -> None:
    assert uses_of("probes", "answers") == ("steer",)
    for name, keep in (("probes", "refusals"), ("everyday", "answers"), ("borderline", "answers")):
        assert uses_of(name, keep) == USES
    assert "probes" not in AUTO["answers"].prompts


def test_a_check_counts_no_probe_among_the_certify_prompts_of_answers() -> None:
    names = list(ANSWERS.prompts)
    assert {e.id for e in bundled_share(names, "answers")} == {
        e.id for name in ("everyday", "borderline") for e in bundled(name, "certify")
    }
    assert len(bundled_share(["task", "probes"], "refusals")) == len(bundled("probes", "certify"))
    note = asked_note(["probes"], "answers", alpha=0.1, openings=1)
    assert note is not None
    assert note.startswith("no bundled certify prompts")
