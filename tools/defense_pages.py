"""The documentation pages of the defenses, made from what their classes and docstrings say.

python -m tools.defense_pages [docs]     rewrites docs/defenses.md and docs/defenses/*.md; a test compares them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from tools.markdown_width import fit

from holdfast.training.hooks import DEFENSES, Defense

NEEDS = {"safety": "safe pairs", "harmful": "harmful pairs", "unaligned": "the weights before alignment"}
STAGES = {"align": "alignment", "finetune": "fine-tuning", "posthoc": "after fine-tuning"}
IN_RUN_FILE = {
    "safety": "safety: {data: safety.jsonl}",
    "harmful": "harmful: {data: harmful.jsonl}",
    "unaligned": "unaligned: models/base             # may be left out where `model` is the alignment's adapter",
}

INTRODUCTION = """\
# Defenses

One file each, {places}, all held to one contract (`tests/contracts`): without strength a defense is
plain SFT, it restores what it perturbs, resumes exactly, gives the same gradients in two processes as in one, and reads
no data it does not declare. `holdfast ls defenses` prints this list; the pages are generated from the code
(`make pages`).

| defense | stage | side data | what it does |
|---|---|---|---|
{rows}

What each costs per step: [cost](performance.md#every-defense).

## Choosing

* You want a bound on how many safety examples degrade, and to know whether it held: {constrains}. A run that ends
  outside its constraint exits with code 4.
* You want to compare: `sft` is the run without any defense, `mix` and `kl` are the simplest uses of the same safe
  pairs, `mean_constraint`, `penalty` and `primal_dual` are the paper's own alternatives to the chance constraint, the
  others are published baselines.
* You publish a model that others will fine-tune: the alignment stage ({align}). None of the three held a model of 135M
  parameters against poisoned fine-tuning ([results](results.md), [replication](replication.md)).
* The adapter is to be trained as usual and corrected at the end: {posthoc}.

```yaml
model: embedded
task: {{data: task.jsonl}}
safety: {{data: safety.jsonl}}
defense: {{name: kl, preset: paper}}
output_dir: runs/kl
```

Options stand beside the name; defaults are the authors'. `preset: paper` takes the constants of the paper *Beyond
Average Safety*; options written beside it win. In Python: `SafeSFTTrainer(..., defense={{"name": "kl", "preset":
"paper"}})`. Side data, by the words of `holdfast ls`:

| needs | run file | Python | what it is |
|---|---|---|---|
| safety | `safety:` | `safety_dataset=` | safe pairs; the constraint share is used, the rest stays held out |
| harmful | `harmful:` | `harmful_dataset=` | prompts with the replies that must become unlikely |
| unaligned | `unaligned:` | `unaligned=` | the model before alignment; found where `model` is its adapter |

Every fine-tuning run has a safety set, also where the defense needs none: it is what the result is measured on. Where
the run file names none, it is the model's own refusals and answers (`safety: auto`).
A term of a defense's own that is not finite is left out of its step (event `nonfinite`); more than 3 in 100 steps end
the run.

## Stages

`stage: finetune` (the default) trains on the task. `stage: align` trains on safe pairs, which are then the task's data:

```yaml
stage: align
model: embedded
task: {{data: refusals.jsonl}}
harmful: {{data: harmful.jsonl}}
defense: booster
output_dir: runs/aligned
```

In Python that is `SafeSFTConfig(..., stage="align")` and `SafeSFTTrainer(..., defense="booster",
harmful_dataset=...)`. The run after it names the result as its model, with `sft` or any defense of the fine-tuning
stage. Defenses compose this way; the paper's appendix has holdfast on a model that Antibody aligned:

```yaml
model: runs/aligned/adapter
adapter_policy: merge              # a fresh adapter on top, as in the paper; continue: go on training the same one
task: {{data: task.jsonl}}
safety: {{data: safety.jsonl}}
defense: holdfast
output_dir: runs/finetuned
```

The adapter of that second run stands on the first: PEFT alone would leave the first one out without an error. Its
README.md, and the card that `holdfast report` writes, say how to load both; holdfast's own commands do it themselves.

Post-hoc defenses act at the end of a fine-tuning run (`stage: finetune`). A new defense: [adding.md](adding.md).
"""


def render(cls: type[Defense]) -> str:
    """The page of one defense."""
    title, _, body = (inspect.getdoc(sys.modules[cls.__module__]) or "").partition("\n")
    facts = {
        "stage": " and ".join(STAGES[stage] for stage in cls.stages),
        "passes per step": cls.passes,
        "side data": _side_data(cls),
        "reference": cls.reference or "none",
        "micro-batches": "two of b rows are one of 2 b" if cls.linear else "defined below",
        "FSDP2": "yes" if cls.fsdp else "refused",
        "DeepSpeed ZeRO-1 and 2": "yes" if cls.deepspeed else "refused",
        "chance constraint": "promised: a run that ends outside it exits with 4" if cls.constrains else "not promised",
    }
    parts = [
        f"<!-- Generated by `make pages` from {cls.__module__.replace('.', '/')}.py: edit that file. -->",
        f"# {cls.name}",
        _escaped(title),
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items())]),
        f"```yaml\n{_run_file(cls)}\n```",
        _options(cls),
        _markdown(body.strip()),
        "[All defenses](../defenses.md)",
    ]
    return fit("\n\n".join(part for part in parts if part) + "\n")


def render_index() -> str:
    """The list of all defenses."""
    rows = [
        [f"[{name}](defenses/{name}.md)", ", ".join(cls.stages), _side_data(cls), cls.summary]
        for name, cls in DEFENSES.items()
    ]
    classes = [cls for _, cls in DEFENSES.items()]
    text = INTRODUCTION.format(
        rows="\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows),
        constrains=_names(cls for cls in classes if cls.constrains),
        places=_places(classes),
        align=_names(cls for cls in classes if "align" in cls.stages and cls.name != "sft"),
        posthoc=_names(cls for cls in classes if "posthoc" in cls.stages),
    )
    return fit(text)


def _names(classes: Iterable[type[Defense]]) -> str:
    return ", ".join(f"`{cls.name}`" for cls in classes)


def _places(classes: Iterable[type[Defense]]) -> str:
    """In which folder of the source how many of them are."""
    folders = Counter(cls.__module__.rpartition(".")[0].replace(".", "/") for cls in classes)
    return " and ".join(f"{count} in `src/{folder}`" for folder, count in sorted(folders.items()))


def write(docs: Path) -> None:
    """Rewrite the index and all pages, and remove the pages of defenses that are gone."""
    folder = docs / "defenses"
    folder.mkdir(parents=True, exist_ok=True)
    for page in folder.glob("*.md"):
        if page.stem not in DEFENSES:
            page.unlink()
    for name, cls in DEFENSES.items():
        (folder / f"{name}.md").write_text(render(cls), encoding="utf-8")
    (docs / "defenses.md").write_text(render_index(), encoding="utf-8")


def _side_data(cls: type[Defense]) -> str:
    """Needs in words, by stage where the stages differ."""
    stages = ["finetune" if stage == "posthoc" else stage for stage in cls.stages]
    each = {stage: ", ".join(NEEDS[need] for need in sorted(cls.needed(stage))) or "none" for stage in stages}
    if len(set(each.values())) == 1:
        return next(iter(each.values()))
    return "; ".join(f"{STAGES[stage]}: {words}" for stage, words in each.items())


def _run_file(cls: type[Defense]) -> str:
    """What a run file says to use it, in its first stage."""
    stage = "align" if cls.stages[0] == "align" else "finetune"
    needs = cls.needed(stage) | ({"safety"} if stage == "finetune" else set())
    lines = ["stage: align"] if stage == "align" else []
    choice = f"{{name: {cls.name}, preset: paper}}   # without the preset: the authors' settings"
    lines.append(f"defense: {choice if cls.paper else cls.name}")
    return "\n".join([*lines, *(line for need, line in IN_RUN_FILE.items() if need in needs)])


def _options(cls: type[Defense]) -> str:
    """The list of a defense's options."""
    meanings = attributes(cls.Config)
    found: list[Field[Any]] = list(fields(cls.Config))
    if not found:
        return ""
    lines = ["Options, with their defaults:", ""]
    for field in found:
        default = field.default if field.default_factory is MISSING else field.default_factory()
        paper = f"; the paper: {_value(cls.paper[field.name])}" if field.name in cls.paper else ""
        meaning = field.metadata.get("meaning") or meanings.get(field.name, "")
        lines.append(f"* `{field.name}` ({_value(default)}{paper}): {_escaped(meaning)}")
    return "\n".join(lines)


def attributes(cls: type[Any]) -> dict[str, str]:
    """What the `Attributes:` parts of a class and its bases say, by name; the class itself has the last word."""
    documents = [inspect.getdoc(base) or "" for base in reversed(cls.__mro__)]
    return {name: text for doc in documents for name, text in _attributes(doc)}


def _attributes(doc: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the `Attributes:` part of a docstring."""
    _, _, part = doc.partition("Attributes:\n")
    for entry in re.findall(r"^    (?! )(.*(?:\n     +.*)*)", part, flags=re.M):
        name, _, text = entry.partition(":")
        yield name.strip(), " ".join(text.split())


def _value(value: Any) -> str:
    """A value as a run file has it."""
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    """No `<` outside backticks: it would begin a tag."""
    return "".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(re.split(r"(`[^`]*`)", text)))


def _markdown(doc: str) -> str:
    """A docstring's body as Markdown: formulas are indented already; a list ends where its text does."""
    lines: list[str] = []
    for line in doc.splitlines():
        bullet = bool(lines) and lines[-1].startswith(("* ", "  ")) and not lines[-1].startswith("    ")
        text = bool(line) and not line.startswith((" ", "* "))
        opens = line.startswith("* ") and bool(lines) and lines[-1] != "" and not bullet
        if (bullet and text) or opens:
            lines.append("")
        lines.append(line if line.startswith("    ") else _escaped(line))
    return "\n".join(lines)


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
