"""Settings and provenance of a run as pairs of words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.percent import exact_percent, percent, percent_up
from holdfast.report.evidence import Evidence, SafetyEvidence
from holdfast.report.fields import Fields
from holdfast.report.wording import counted, number, one_line, setting


@dataclass(frozen=True)
class Fact:
    """A name and its value, both as shown."""

    name: str
    value: str


def facts(evidence: Evidence) -> list[Fact]:
    """The settings that decide a result, and what made it."""
    found = [*_settings(evidence.config or {}), *_audited(evidence)]
    for one in evidence.sets:
        if one.limit is not None:
            suffix = f", {one.name}" if evidence.named else ""
            words = f"at most {exact_percent(one.limit.alpha)} beyond {setting(one.limit.tau)} {one.limit.words}"
            found.append(Fact(f"limit{suffix}", f"{words} ({one.limit.unit})"))
        if one.noise_floor == one.noise_floor:
            found.append(Fact("noise floor", f"{one.noise_floor:.2g} (the unchanged model measured twice)"))
    made = evidence.result or next((one.audit for one in evidence.sets if one.audit is not None), None)
    if evidence.result is not None:
        steps = f"{counted(evidence.result.count('steps'), 'step')} in {evidence.result.number('seconds'):,.0f} s"
        found.append(Fact("training", steps))
        found += _rows_left_out(evidence.result)
    return found + (_made(made) if made is not None else [])


def _settings(config: Mapping[str, Any]) -> list[Fact]:
    task, lora, train = (_block(config, key) for key in ("task", "lora", "train"))
    values = {
        "model": config.get("model"),
        "task data": task.get("data") or task.get("name"),
        "safety data": _safety_places(config),
        "defense": _block(config, "defense").get("name"),
        "LoRA": f"r {lora['r']}, alpha {lora.get('alpha')}" if "r" in lora else None,
        "learning rate": train.get("learning_rate"),
        "batch size": train.get("per_device_train_batch_size"),
        "precision": config.get("dtype"),
        "seed": config.get("seed"),
    }
    return [Fact(name, one_line(str(value))) for name, value in values.items() if value is not None]


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _safety_places(config: Mapping[str, Any]) -> str | None:
    block = _block(config, "safety")
    if "data" in block or "keep" in block:
        return _safety_place(block)
    places = [_safety_place(inner) for inner in block.values() if isinstance(inner, Mapping)]
    return ", ".join(places) or None


def _safety_place(block: Mapping[str, Any]) -> str:
    """A file or hub id; of a set that was built by asking, what the model was asked."""
    prompts = block.get("prompts")
    if isinstance(prompts, list):
        return f"{block.get('keep')} of the model before, asked {', '.join(map(str, prompts))}"
    return str(block.get("data"))


def _audited(evidence: Evidence) -> list[Fact]:
    """Before, after and data of a plain audit, which has no settings of a run."""
    found = []
    for one in evidence.sets:
        if evidence.config is None and one.audit is not None:
            for side in ("before", "after"):
                if side in one.audit:
                    found.append(Fact(side, one_line(one.audit.inner(side).text("ref", "unknown"))))
            if "data" in one.audit:
                found.append(Fact("data", one_line(one.audit.inner("data").text("source", "unknown"))))
    return found


def _rows_left_out(result: Fields) -> list[Fact]:
    """Rows of the run's data that were skipped as malformed or dropped as duplicates; nothing where all were used."""
    if "data" not in result:
        return []
    counts = result.inner("data")
    blocks = counts.objects("safety")
    if "task" in counts:
        blocks = {"task": counts.inner("task"), **blocks}
    found = []
    for name, block in blocks.items():
        for key, words in (("skipped", "malformed rows skipped"), ("duplicates_dropped", "duplicate rows dropped")):
            if key in block and (number := block.count(key)):
                found.append(Fact(f"{one_line(name)} data, {words}", str(number)))
    return found


def _made(made: Fields) -> list[Fact]:
    named = {"hardware": "hardware", "commit": "holdfast commit"}
    found = [Fact(name, one_line(made.text(key))) for key, name in named.items() if key in made]
    if "versions" in made:
        versions = made.inner("versions").value
        found.append(Fact("versions", one_line(", ".join(f"{k} {v}" for k, v in versions.items()), 600)))
    return found


def hashes(evidence: Evidence) -> list[Fact]:
    """Every sha256 that ties the figures to files."""
    values: dict[str, str] = {}
    if evidence.result is not None and "config_sha256" in evidence.result:
        values["settings"] = evidence.result.text("config_sha256")
    for one in evidence.sets:
        prefix, audit = f"{one.name}: " if evidence.named else "", one.audit
        if audit is not None:
            for side in ("before", "after", "data"):
                if side in audit and "sha256" in audit.inner(side):
                    values[f"{prefix}audit, {side}"] = audit.inner(side).text("sha256")
            for kind in ("tokenizer", "template"):
                if f"{kind}_sha256" in audit:
                    values[f"{prefix}audit, {kind}"] = audit.text(f"{kind}_sha256")
        if one.certificate is not None:
            bound = one.certificate.fields.inner("bound")
            for key in bound.value:
                if key in bound and key != "replies_sha256":  # one hash a file, private
                    values[f"{prefix}certificate, {one_line(key.removesuffix('_sha256'))}"] = bound.text(key)
            values[f"{prefix}certificate itself"] = one.certificate.fields.text("sha256")
    return [Fact(name, one_line(value)) for name, value in values.items()]


def judged_replies(one: SafetyEvidence) -> list[Fact]:
    """What a judge said of both models' replies; none where there was no judge."""
    if one.behaviour is None:
        return []
    b = one.behaviour
    n = b.count("n")
    found = [
        Fact("judge", b.text("judge")),
        Fact("safe before", f"{b.count('safe_before'):,} of {n:,}"),
        Fact("safe after", f"{b.count('safe_after'):,} of {n:,}"),
        Fact("flips: safe before, unsafe after", f"{b.count('flips'):,} ({percent(b.number('flip_rate'))})"),
        Fact("95 % upper bound of the flip rate", percent_up(b.number("flip_upper"))),
        Fact("not scored", f"{b.count('unscored'):,}"),
    ]
    if "on_policy" in b:
        rises = b.inner("on_policy")
        what = f"replies whose judged probability of harm rose by more than {setting(rises.number('tau'))}"
        found.append(Fact(what, f"{rises.count('regressions'):,} (upper bound {percent_up(rises.number('upper'))})"))
    return found


TESTS = {
    "fixed": "exact binomial test, over groups and over prompts",
    "finite_pool": "exact test for a known list (hypergeometric)",
    "sequential": "e-process over prompts in sequence",
    "per_category": "one exact test per category (Holm)",
    "strength": "largest safe adapter strength (Learn-then-Test)",
}
WAYS = {
    "behaviour": "replies, refused or not",
    "harm": "replies, as a judge scores them",
    "kl": "divergences (a steering figure)",
    "likelihood": "likelihoods (a steering figure)",
    "log": "two evaluation logs",
}


def certificate_facts(one: SafetyEvidence) -> list[Fact]:
    """The certificate of a safety set, line by line."""
    c = one.certificate
    if c is None:
        return []
    lost = "lost" if c.by in ("behaviour", "log") else f"beyond {setting(c.limit.tau)} {c.limit.words}"
    units = counted(c.n, "prompt" if c.by_prompt else "group")
    found = [
        Fact("verdict in the file", "certified" if c.certified else "not certified"),
        Fact("test", TESTS.get(c.kind, c.kind)),
        Fact("compared", WAYS.get(c.by, c.by)),
        Fact("limit", f"at most {exact_percent(c.limit.alpha)} {lost}"),
        Fact("regressions", f"{c.regressions:,} of {units} ({counted(c.examples, 'prompt')})"),
        Fact("upper bound", f"{percent_up(c.upper)} at {exact_percent(c.confidence)} confidence"),
        Fact("openings of the split", f"number {c.this_opening} of {c.declared} declared beforehand"),
        Fact("training data searched for these prompts", "yes, none found" if c.leakage_checked else "no"),
    ]
    if math.isfinite(c.certified_tau):
        found.insert(5, Fact("certified tau", f"the same test certifies any tau from {number(c.certified_tau)} on"))
    if c.strength is not None:
        found.insert(2, Fact("largest certified strength", setting(c.strength)))
    return found
