"""Settings, provenance, screening and certificate of a run in plain words."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.core.files import read_plain_file
from holdfast.core.percent import exact_percent, percent, percent_up
from holdfast.reporting.evidence import Evidence, SafetyEvidence
from holdfast.reporting.fields import Fields
from holdfast.reporting.wording import counted, number, one_line, setting

CONFLICTS = "screening/conflicts.jsonl"
Fact = tuple[str, str]  # a name and its value, both as shown


def facts(evidence: Evidence) -> list[Fact]:
    """The settings that decide a result, and what made it."""
    found = _settings(evidence.config or {})
    if evidence.config is None:  # a plain audit has no settings of a run
        keys = {"before": "ref", "after": "ref", "data": "source"}
        each = [one.audit for one in evidence.sets if one.audit is not None]
        found += [(name, one_line(one.inner(name).text(key, "unknown"))) for one in each for name, key in keys.items()]
    for one in evidence.sets:
        if one.limit is not None:
            suffix = f", {one.name}" if evidence.named else ""
            words = f"at most {exact_percent(one.limit.alpha)} beyond {setting(one.limit.tau)} {one.limit.words}"
            found.append((f"limit{suffix}", f"{words} ({one.limit.unit})"))
        if one.noise_floor == one.noise_floor:
            found.append(("noise floor", f"{one.noise_floor:.2g} (what rounding alone moves the model by)"))
    made = evidence.result or next((one.audit for one in evidence.sets if one.audit is not None), None)
    if evidence.result is not None:
        steps = f"{counted(evidence.result.count('steps'), 'step')} in {evidence.result.number('seconds'):,.0f} s"
        found.append(("training", f"{steps}, without asking and measuring"))
        found += [("task loss", words) for words in task_loss(evidence.events)]
        found += _rows_left_out(evidence.result)
    if made is not None:
        named = {"hardware": "hardware", "commit": "holdfast commit"}
        found += [(name, one_line(made.text(key))) for key, name in named.items() if key in made]
        if "versions" in made:
            versions = made.inner("versions").value
            found.append(("versions", one_line(", ".join(f"{k} {v}" for k, v in versions.items()), 600)))
    return found


PARTS = {
    "loading": "reading data and model",
    "asking": "asking the model before training",
    "preparing": "preparing the rows, measuring the model before",
    "training": "training",
    "monitoring": "asking the behaviour monitor's prompts",
    "saving": "saving",
    "measuring": "measuring the trained model",
}
"""Part of a run -> its words, in the order in which they come."""
MEMORY = {"host": "peak memory of the process", "device": "peak memory of the GPU"}


def cost_facts(evidence: Evidence) -> list[Fact]:
    """Seconds by part and the most memory, as far as they are known; nothing of a run that did not store them."""
    if evidence.result is None or "cost" not in evidence.result:
        return []
    cost = evidence.result.inner("cost")
    seconds, memory = (cost.inner(key) if key in cost else None for key in ("seconds", "peak_memory"))
    found: list[Fact] = []
    if seconds is not None:
        parts = {part: seconds.number(part) for part in PARTS if part in seconds}
        total = sum(parts.values())
        found += [(PARTS[part], _seconds(value, total)) for part, value in parts.items()]
        found.append(("in all", f"{total:,.0f} s"))
    if memory is not None:
        found += [(words, f"{memory.number(key) / 2**30:,.2f} GiB") for key, words in MEMORY.items() if key in memory]
    return found


def _seconds(value: float, total: float) -> str:
    return f"{value:,.0f} s" + (f" ({percent(value / total)})" if total else "")


UNLEARNED = 2.0
"""Nats a token: about what a model has on ordinary text that it does not know."""


def task_loss(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The loss per target token over the first and the last tenth of the steps, on the rows that were trained on.

    exp(-loss) is the geometric mean of what the model gives the tokens of the targets.
    """
    logged = (row.get("loss") for row in events)
    losses = [loss for loss in logged if isinstance(loss, float) and math.isfinite(loss)]
    if len(losses) < 2:
        return []
    tenth = math.ceil(len(losses) / 10)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    means = f"means of {counted(tenth, 'step')}; a target token's probability is then {percent(math.exp(-last))}"
    far = ". Above 2 a task is often not learned yet: look at some replies" if last > UNLEARNED else ""
    return [f"{first:.4g} at the start, {last:.4g} at the end ({means}){far}"]


MOST_LINES = 10


def conflict_lines(run: Path, *, dropped: bool = False) -> str:
    """Where a run's conflicts stand in their file, or those that were left out: `lines 3, 17`; empty if not known."""
    try:
        listed = read_plain_file(run / CONFLICTS, remedy="")
        rows = [json.loads(line) for line in listed.splitlines()]
        chosen = [row["line"] for row in rows if row["dropped"] or not dropped]
        files = {row["where"].rpartition(":")[0] for row in rows}
    except (CheckpointError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    lines = sorted(line for line in chosen if isinstance(line, int))
    if not lines or len(files) > 1:  # a line of which of them?
        return ""
    more = f" and {len(lines) - MOST_LINES:,} more" if len(lines) > MOST_LINES else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:MOST_LINES]))}{more} of the task file"


def _settings(config: Mapping[str, Any]) -> list[Fact]:
    def place(block: Mapping[str, Any]) -> str:
        asked = block.get("prompts")
        if isinstance(asked, list):  # a set that was built by asking
            return f"{block.get('keep')} of the model before, asked {', '.join(map(str, asked))}"
        return str(block.get("data"))

    blocks = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    task, lora, train, safety, defense = (blocks.get(k, {}) for k in ("task", "lora", "train", "safety", "defense"))
    sets = [safety] if "data" in safety or "keep" in safety else [s for s in safety.values() if isinstance(s, Mapping)]
    values = {
        "model": config.get("model"), "task data": task.get("data") or task.get("name"),
        "safety data": ", ".join(map(place, sets)) or None, "defense": defense.get("name"),
        "LoRA": f"r {lora['r']}, alpha {lora.get('alpha')}" if "r" in lora else None,
        "learning rate": train.get("learning_rate"), "batch size": train.get("per_device_train_batch_size"),
        "precision": config.get("dtype"), "seed": config.get("seed"),
    }  # fmt: skip
    return [(name, one_line(str(value))) for name, value in values.items() if value is not None]


def _rows_left_out(result: Fields) -> list[Fact]:
    """Rows of the run's data that were skipped as malformed or dropped as duplicates; nothing where all were used."""
    if "data" not in result:
        return []
    counts = result.inner("data")
    blocks = ({"task": counts.inner("task")} if "task" in counts else {}) | counts.objects("safety")
    reasons = {"skipped": "malformed rows skipped", "duplicates_dropped": "duplicate rows dropped"}
    return [
        (f"{one_line(name)} data, {words}", str(block.count(key)))
        for name, block in blocks.items()
        for key, words in reasons.items()
        if key in block and block.count(key)
    ]


UNSEEN = "none: an endpoint, whose weights were not seen"


def hashes(evidence: Evidence) -> list[Fact]:
    """Every sha256 that ties the figures to files."""
    values: dict[str, str] = {}
    if evidence.result is not None and "config_sha256" in evidence.result:
        values["settings"] = evidence.result.text("config_sha256")
    for one in evidence.sets:
        prefix, audit = f"{one.name}: " if evidence.named else "", one.audit
        if audit is not None:
            for side in ("before", "after", "data"):
                values[f"{prefix}audit, {side}"] = audit.inner(side).text("sha256", UNSEEN)
            for kind in ("tokenizer", "template"):
                if f"{kind}_sha256" in audit:
                    values[f"{prefix}audit, {kind}"] = audit.text(f"{kind}_sha256")
        if one.certificate is not None:
            for key, value in one.certificate.record.bound.items():
                if isinstance(value, str):  # the replies have one hash a file, private
                    values[f"{prefix}certificate, {key.removesuffix('_sha256')}"] = value
            values[f"{prefix}certificate itself"] = one.certificate.sha256
    return [(name, one_line(value)) for name, value in values.items()]


def judged_replies(one: SafetyEvidence) -> list[Fact]:
    """What a judge said of both models' replies; none where there was no judge."""
    b = one.behaviour
    if b is None:
        return []
    n = b.count("n")
    found = [
        ("judge", b.text("judge")),
        ("safe before", f"{b.count('safe_before'):,} of {n:,}"),
        ("safe after", f"{b.count('safe_after'):,} of {n:,}"),
        ("flips: safe before, unsafe after", f"{b.count('flips'):,} ({percent(b.number('flip_rate'))})"),
        ("95 % upper bound of the flip rate", percent_up(b.number("flip_upper"))),
        ("not scored", f"{b.count('unscored'):,}"),
    ]
    if "on_policy" in b:
        rises = b.inner("on_policy")
        what = f"replies whose judged probability of harm rose by more than {setting(rises.number('tau'))}"
        found.append((what, f"{rises.count('regressions'):,} (upper bound {percent_up(rises.number('upper'))})"))
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
    if one.certificate is None:
        return []
    c, limit, strength = one.certificate.record, one.certificate.limit, one.certificate.strength
    lost = "lost" if c.by in ("behaviour", "log") else f"beyond {setting(limit.tau)} {limit.words}"
    units = counted(c.n, "prompt" if one.certificate.by_prompt else "group")
    tau = None if c.certified_tau is None else number(c.certified_tau)
    found = {
        "verdict in the file": "certified" if c.certified else "not certified",
        "test": TESTS.get(c.kind, c.kind),
        "largest certified strength": None if strength is None else setting(strength),
        "compared": WAYS.get(c.by, c.by),
        "limit": f"at most {exact_percent(limit.alpha)} {lost}",
        "regressions": f"{c.regressions:,} of {units} ({counted(c.examples, 'prompt')})",
        "certified tau": tau and f"the same test certifies any tau from {tau} on",
        "upper bound": f"{percent_up(c.upper_bound)} at {exact_percent(c.confidence)} confidence",
        "openings of the split": f"number {c.openings['this']} of {c.openings['declared']} declared beforehand",
        "training data searched for these prompts": "yes, none found" if c.leakage["checked"] else "no",
    }
    return [(name, value) for name, value in found.items() if value is not None]


SOURCES = {"task": "task prompts", "probes": "bundled probes", "everyday": "everyday prompts",
           "borderline": "borderline prompts"}  # fmt: skip
RULES = {
    "drop": "{dropped} of them were left out of training (conflicts: drop)",
    "keep": "they were trained on, and the model's refusals were held against them (conflicts: keep)",
    "fail": "such rows end a run (conflicts: fail)",
    "learn": "{dropped} of them were left out of training, and the others were meant to be learned (conflicts: learn)",
}


def screening_lines(evidence: Evidence) -> list[str]:
    """What the run found when it asked its model before training; counts, and no text of any prompt."""
    if evidence.result is None or "screening" not in evidence.result:
        return []
    found = evidence.result.inner("screening")
    sets = [_screened_set(name, one) for name, one in found.objects("sets").items()]
    return [*_screened_rows(found, conflict_lines(evidence.folder)), *sets] if found.count("asked_rows") or sets else []


def _screened_rows(found: Fields, where: str) -> list[str]:
    rows, asked = found.count("rows"), found.count("asked_rows")
    if not asked:
        return [f"The model was not asked about the {counted(rows, 'task row')}."]
    whom = "all of them" if asked == rows else f"{asked:,} of them"
    lines = [f"{counted(rows, 'task row')}; before training the model was asked about {whom}."]
    if conflicts := found.count("conflicts"):
        rule = RULES.get(found.text("rule"), "").format(dropped=f"{found.count('dropped'):,}")
        teach, groups = counted(conflicts, "row teaches", "rows teach"), counted(found.count("groups"), "group")
        listed = f"{CONFLICTS} lists them{f' ({where})' if where else ''}."
        lines.append(f"{teach} what it refuses, in {groups} of near-duplicate prompts; {rule}. {listed}")
    else:
        lines.append("No row teaches what it refuses.")
    if "not_asked" in found:
        left = found.inner("not_asked")
        low, high = (left.inner("conflict_share").number(end) for end in ("low", "high"))
        lines.append(
            f"{counted(left.count('rows'), 'row')} were not asked about and were trained on: between {percent(low)} "
            f"and {percent_up(high)} of them teach what it refuses (95 %)."
        )
    return lines


def _screened_set(name: str, one: Fields) -> str:
    """What is held: whose replies, to prompts of which sources, and what became of them."""

    def source(where: str) -> str:  # of a file its name alone, since a card is made to be published
        return SOURCES.get(where) or f"prompts of {one_line(Path(where).name if Path(where).is_absolute() else where)}"

    kept = "refusals" if one.text("keep") == "refusals" else "answers"
    sources = " and ".join(
        f"{counts.count('kept'):,} of {counts.count('asked'):,} {source(where)}"
        for where, counts in one.objects("sources").items()
    )
    roles = one.inner("roles")
    return (
        f"Held as {one_line(name)}: the model's own {kept}, to {sources}. {roles.count('constraint'):,} steer, "
        f"{roles.count('monitor'):,} are watched, and {counted(roles.count('certify'), 'further prompt')} are kept for "
        "a certificate."
    )
