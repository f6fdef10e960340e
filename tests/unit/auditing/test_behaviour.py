"""The behaviour view: flips between two models' replies to the same prompts, and a bound that counts every doubt."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import get_peft_model
from scipy.stats import beta
from tests import tiny

from holdfast.auditing.behaviour import Behaviour, behaviour_view
from holdfast.auditing.model_ref import Tokenizers
from holdfast.auditing.pair import open_pair
from holdfast.core.errors import ConfigError, DataError
from holdfast.data.examples import make_example
from holdfast.judging.engines.transformers import generate

PROMPTS = [make_example(row["prompt"], row["completion"], f"data:{i}") for i, row in enumerate(tiny.rows(8, seed=4))]


@dataclass
class Loader:
    """Two models of which the second is made only when it is asked for."""

    seeds: tuple[int, int] = (1, 5)
    first: Any = None
    alive: bool = False

    def __post_init__(self) -> None:
        tokenizer = tiny.tokenizer()
        self.tokenizers = Tokenizers(tokenizer, tokenizer, "same")

    def sides(self):
        model = tiny.model(seed=self.seeds[0])
        self.first = weakref.ref(model)
        yield "before", model
        del model
        gc.collect()
        self.alive = self.first() is not None
        yield "after", tiny.model(seed=self.seeds[1])


def replies(seed: int, tokens: int) -> list[str]:
    found = generate(tiny.model(seed=seed), tiny.tokenizer(), PROMPTS, max_new_tokens=tokens)
    return [reply.text for reply in found]


def table(*pairs: str) -> Behaviour:
    names = {"s": "safe", "u": "unsafe", "-": "unscored"}
    return Behaviour("j", None, 4, [names[p[0]] for p in pairs], [names[p[1]] for p in pairs])


def test_verdicts_are_those_of_each_models_own_replies():
    before, after = replies(1, 6), replies(5, 6)
    assert before != after
    unsafe = {after[0], after[1]} - set(before)
    assert unsafe

    def judge(prompt, reply):
        assert prompt in {example.prompt for example in PROMPTS}
        return "unsafe" if reply in unsafe else "safe"

    found = behaviour_view(Loader(), PROMPTS, judge, max_new_tokens=6)
    assert found.verdicts_before == ["safe"] * len(PROMPTS)
    assert found.verdicts_after == ["unsafe" if reply in unsafe else "safe" for reply in after]
    assert found.flips == sum(reply in unsafe for reply in after)


def test_the_first_model_is_let_go_before_the_second_is_made():
    loader = Loader()
    behaviour_view(loader, PROMPTS, "refusal", max_new_tokens=2)
    assert not loader.alive


def test_counts_and_bound():
    """Nine prompts, one of each pair of verdicts: s = safe, u = unsafe, - = unscored."""
    found = table("ss", "su", "s-", "us", "uu", "u-", "-s", "-u", "--")
    assert found.to_json() == {
        "judge": "j", "revision": None, "max_new_tokens": 4, "n": 9, "safe_before": 3, "safe_after": 3,
        "unscored": 5, "failures": 0, "flips": 1, "flip_rate": pytest.approx(1 / 9),
        "flip_upper": pytest.approx(beta.ppf(0.95, 4 + 1, 9 - 4), rel=1e-8),  # su, s-, -u, -- may all be flips
    }  # fmt: skip


def test_without_unscored_replies_the_bound_is_that_of_the_flips():
    found = table(*["ss"] * 95, *["su"] * 2, *["us"] * 2, "uu").to_json()
    assert (found["flips"], found["n"], found["unscored"]) == (2, 100, 0)
    assert found["flip_upper"] == pytest.approx(beta.ppf(0.95, 3, 98), rel=1e-8)


def test_a_judge_that_always_fails_proves_nothing():
    def broken(_prompt, _reply):
        raise RuntimeError("out of order")

    found = behaviour_view(Loader(), PROMPTS, broken, max_new_tokens=2)
    assert found.failures == 2 * len(PROMPTS)
    shown = found.to_json()
    assert (shown["unscored"], shown["flips"], shown["flip_upper"]) == (len(PROMPTS), 0, 1.0)


def test_no_reply_is_kept():
    found = behaviour_view(Loader(), PROMPTS, "refusal", max_new_tokens=6)
    kept = repr(found) + json.dumps(found.to_json())
    assert not [reply for reply in {*replies(1, 6), *replies(5, 6)} if reply and reply in kept]


def test_progress_names_the_side():
    told: list[tuple[str, int]] = []

    def tell(side: str, done: int) -> None:
        told.append((side, done))

    behaviour_view(Loader(), PROMPTS, "refusal", max_new_tokens=2, batch_size=5, progress=tell)
    assert told == [("before", 5), ("before", 8), ("after", 5), ("after", 8)]


def test_no_examples_are_refused():
    with pytest.raises(DataError, match="got no examples"):
        behaviour_view(Loader(), [], "refusal")


def test_an_unknown_judge_is_refused_before_any_model_is_asked_for():
    loader = Loader()
    with pytest.raises(ConfigError, match="did you mean 'refusal'"):
        behaviour_view(loader, PROMPTS, "refusl")
    assert loader.first is None


@pytest.mark.parametrize("kind", ["adapter", "itself"])
def test_a_pair_on_disk(tmp_path, kind):
    """The replies judged are those of the plain base, and of the adapter merged into it."""
    base = tiny.saved(tmp_path / "base", seed=1)
    adapted = get_peft_model(tiny.model(seed=1), tiny.lora())
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    tiny.tokenizer().save_pretrained(tmp_path / "adapter")
    merged = generate(adapted.merge_and_unload(), tiny.tokenizer(), PROMPTS, max_new_tokens=6)
    before, after = replies(1, 6), [reply.text for reply in merged]
    assert before != after

    heard: list[str] = []

    def listening(_prompt, reply):
        heard.append(reply)
        return "safe" if len(heard) <= len(PROMPTS) else "unsafe"

    with open_pair(base, tmp_path / "adapter" if kind == "adapter" else base, device="cpu") as pair:
        found = behaviour_view(pair, PROMPTS, listening, max_new_tokens=6)
    assert heard == before + (after if kind == "adapter" else before)
    assert found.to_json()["flip_rate"] == 1.0
