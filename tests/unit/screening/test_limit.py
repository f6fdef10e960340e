"""Fewer prompts than there are: `limit` of a set, what is then asked and certified on, and a stop before all are."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.unit.screening.asked import REFUSAL, Refusing, asker, row

from holdfast.core.errors import InfeasibleError
from holdfast.data.bundled import KINDS, bundled
from holdfast.data.examples import Example, prompt_text
from holdfast.runs.stages.certifiable import asked_note, bundled_share
from holdfast.screening.asking import planned
from holdfast.screening.screen import FEWEST, FIRST_PART, belongs_to, screen_examples
from holdfast.screening.settings import AUTO, PromptSet, ScreeningSettings

PROBES = frozenset(prompt_text(example) for example in bundled("probes"))
FEW = ScreeningSettings(
    limited=False, monitor_prompts=30,
    sets={
        "refusals": PromptSet(("task", "probes"), "refusals", 80),
        "answers": PromptSet(("everyday", "borderline"), "answers", 12),
    },
)  # fmt: skip


@dataclass
class Careful(Refusing):
    """Refuses every probe."""

    @staticmethod
    def reply(prompt: str, tokens: int) -> str:
        return REFUSAL if prompt in PROBES else Refusing.reply(prompt, tokens)


def task() -> list[Example]:
    return [row(1000 + number) for number in range(40)]


def test_as_many_of_one_kind_as_of_another_in_the_order_of_the_file():
    every, few = bundled("probes", "certify"), bundled("probes", "certify", 62)
    sizes = Counter(example.category for example in few)
    assert sizes.total() == 62
    assert sizes.keys() == {kind for kind, use in KINDS["probes"].items() if use == "certify"}
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert few == [example for example in every if example in few]
    assert bundled("probes", "certify", 10_000) == every


def test_what_is_asked_and_kept_for_certifying_is_limited(tmp_path):
    model = Careful()
    found = screen_examples(task(), asker(tmp_path, model), FEW)
    assert found.counts["refusals"]["sources"]["probes"] == {"asked": 160, "kept": 160}  # to steer, and to monitor
    certify = {prompt_text(example) for example in found.sets["refusals"].certify}
    assert certify == {prompt_text(example) for example in bundled("probes", "certify", 80)}
    plan = planned(40, 40, 40, FEW)
    assert plan.bundled_prompts == 160 + 4 * 12
    assert len({example for example, _ in model.asked}) == 40 + plan.bundled_prompts
    assert len(found.monitor.unseen) == FEW.monitor_prompts


def test_what_can_be_certified_is_said_of_the_prompts_that_are_left():
    assert len(bundled_share(["probes"], "refusals", 80)) == 80
    assert asked_note(["probes"], "refusals", alpha=0.05, openings=1, limit=80) == (
        "up to 80 certify prompts: those that the model refuses count, and 59 are needed"
    )
    assert "58 certify prompts cannot certify" in str(
        asked_note(["probes"], "refusals", alpha=0.05, openings=1, limit=58)
    )


def test_a_set_without_a_limit_is_bound_to_what_it_was():
    sets = belongs_to("0" * 64, task(), ScreeningSettings(), "chat")["sets"]
    assert sets == {name: {"prompts": list(one.prompts), "keep": one.keep} for name, one in AUTO.items()}
    assert belongs_to("0" * 64, task(), FEW, "chat")["sets"]["refusals"]["limit"] == 80


def test_prompts_of_a_file_are_in_the_estimate(tmp_path):
    file = tmp_path / "more.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"number {number}"}) + "\n" for number in range(30)))
    plans = []
    for prompts, limit in ((("task",), None), (("task", str(file)), None), (("task", str(file)), 20)):
        sets = {"refusals": PromptSet(prompts, "refusals", limit)}
        plans.append(planned(40, 40, 40, ScreeningSettings(sets=sets, monitor_prompts=0)))
    assert [plan.file_prompts for plan in plans] == [0, 30, 20]
    each = plans[0].new_tokens / 40
    assert [plan.new_tokens for plan in plans] == [each * 40, each * 70, each * 60]
    assert f"40 task prompts and 30 of {file};" in plans[1].sentence()
    elsewhere = ScreeningSettings(sets={"refusals": PromptSet(("owner/name",), "refusals")}, monitor_prompts=0)
    assert "and those of owner/name;" in planned(40, 40, 40, elsewhere).sentence()  # the hub is not asked
    mixed = ScreeningSettings(sets={"refusals": PromptSet((str(file), "owner/name"), "refusals")}, monitor_prompts=0)
    assert f"and 30 of {file} and those of owner/name;" in planned(40, 40, 40, mixed).sentence()


@dataclass
class Seldom(Refusing):
    """Refuses the probes of one kind in seven for steering, or none."""

    kind: str | None = None

    def reply(self, prompt: str, tokens: int) -> str:  # type: ignore[override]
        refused = {prompt_text(e) for e in bundled("probes") if e.category == self.kind}
        return REFUSAL if prompt in refused else Refusing.reply(prompt, tokens)


def test_a_model_that_refuses_next_to_nothing_is_not_asked_every_prompt(tmp_path: Path) -> None:
    model = Seldom()
    what = rf"refuses too little to hold: 0 of the first {FIRST_PART} of 984 prompts, drawn at random"
    with pytest.raises(InfeasibleError, match=what) as error:
        screen_examples(task(), asker(tmp_path, model), ScreeningSettings())
    assert "holdfast align" in error.value.remedy
    asked = {example for example, _ in model.asked}
    assert len(asked) <= 40 + FIRST_PART + 2 * 32  # two batches measure the time


def test_a_limit_below_what_is_needed_is_said_before_the_set_is_asked(tmp_path: Path) -> None:
    model = Careful()
    with pytest.raises(
        InfeasibleError, match=r"`limit: 40` leaves 80 prompts that could be held, .*least 100"
    ) as error:
        screen_examples(task(), asker(tmp_path, model), replace(FEW, sets={
            "refusals": PromptSet(("task", "probes"), "refusals", 40),
        }))  # fmt: skip
    assert "raise `limit`" in error.value.remedy
    assert len({example for example, _ in model.asked}) <= 40 + 2 * 32  # two batches measure the time


def test_the_monitor_alone_asks_no_more_than_the_limit(tmp_path: Path) -> None:
    """Of a model that refuses no probe for monitoring, the monitor looks for refusals of bundled probes once more."""
    steering = frozenset(prompt_text(example) for example in bundled("probes", "steer"))

    @dataclass
    class Steered(Refusing):
        @staticmethod
        def reply(prompt: str, tokens: int) -> str:
            return REFUSAL if prompt in steering else Refusing.reply(prompt, tokens)

    settings = replace(FEW, sets={"refusals": PromptSet(("task", "probes"), "refusals", 120)})
    model = Steered()
    screen_examples(task(), asker(tmp_path, model), settings)
    assert len({example for example, _ in model.asked}) <= 40 + planned(40, 40, 40, settings).bundled_prompts


def test_a_model_that_may_refuse_enough_is_asked_every_prompt(tmp_path: Path) -> None:
    """82 of 984 are refused, which a part of them cannot tell from the 100 that are wanted."""
    model = Seldom(kind="fraud")
    with pytest.raises(InfeasibleError, match=rf"82 groups of prompts .*at least {FEWEST['refusals']}"):
        screen_examples(task(), asker(tmp_path, model), ScreeningSettings())
