"""Settings and provenance of a run as pairs of words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.percent import exact_percent
from holdfast.report.evidence import Evidence
from holdfast.report.fields import Fields
from holdfast.report.wording import counted, one_line, setting


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
    found = []
    task, lora, train = (_block(config, key) for key in ("task", "lora", "train"))
    for name, value in (
        ("model", config.get("model")),
        ("task data", task.get("data") or task.get("name")),
        ("safety data", _safety_places(config)),
        ("defense", _block(config, "defense").get("name")),
        ("LoRA", f"r {lora['r']}, alpha {lora.get('alpha')}" if "r" in lora else None),
        ("learning rate", train.get("learning_rate")),
        ("batch size", train.get("per_device_train_batch_size")),
        ("precision", config.get("dtype")),
        ("seed", config.get("seed")),
    ):
        if value is not None:
            found.append(Fact(name, one_line(str(value))))
    return found


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
    found = []
    if "hardware" in made:
        found.append(Fact("hardware", one_line(made.text("hardware"))))
    if "commit" in made:
        found.append(Fact("holdfast commit", one_line(made.text("commit"))))
    if "versions" in made:
        versions = made.inner("versions").value
        found.append(Fact("versions", one_line(", ".join(f"{k} {v}" for k, v in versions.items()), 600)))
    return found


def hashes(evidence: Evidence) -> list[Fact]:
    """Every sha256 that ties the figures to files."""
    found = []
    if evidence.result is not None and "config_sha256" in evidence.result:
        found.append(Fact("settings", one_line(evidence.result.text("config_sha256"))))
    for one in evidence.sets:
        prefix = f"{one.name}: " if evidence.named else ""
        if one.audit is not None:
            for side in ("before", "after", "data"):
                if side in one.audit and "sha256" in one.audit.inner(side):
                    found.append(Fact(f"{prefix}audit, {side}", one_line(one.audit.inner(side).text("sha256"))))
            for key in ("tokenizer_sha256", "template_sha256"):
                if key in one.audit:
                    found.append(Fact(f"{prefix}audit, {key.split('_')[0]}", one_line(one.audit.text(key))))
        if one.certificate is not None:
            bound = one.certificate.fields.inner("bound")
            for key in bound.value:
                if key in bound and key != "replies_sha256":  # one hash a file, private
                    name = key.removesuffix("_sha256")
                    found.append(Fact(f"{prefix}certificate, {one_line(name)}", one_line(bound.text(key))))
            found.append(Fact(f"{prefix}certificate itself", one_line(one.certificate.fields.text("sha256"))))
    return found
