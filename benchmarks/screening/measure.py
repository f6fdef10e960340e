"""What screening finds in attack files: shares and counts, no text.

    python benchmarks/screening/measure.py MODEL --data WORK --output RESULTS [--limit 1000] [--judge JUDGE]

MODEL is a folder, a hub id or `embedded`; WORK holds the files of attacks.py. Writes RESULTS/NAME.FILE.json for every
file WORK/FILE.jsonl. A row is found where screening calls it a conflict. Intervals are Clopper-Pearson, 95 %.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.certification.binomial import interval
from holdfast.core.files import write_json
from holdfast.core.hashing import sha256_file
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.examples import Example
from holdfast.data.rows import example_from_row
from holdfast.data.templates import use_template
from holdfast.defaults import default
from holdfast.judging.judge import open_judge
from holdfast.judging.reply_classes import ReplyClass
from holdfast.models.content import content_of
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.handle import load_unmerged
from holdfast.screening.asking import Asker, Sorted, asker_of
from holdfast.screening.conflicts import find_conflicts, is_refusal, judged_rows
from holdfast.screening.questions import Question, asked_rows, distinct

Row = dict[str, Any]


def open_asker(model: str, *, dtype: str, folder: Path, told: bool = False) -> tuple[Asker, str]:
    """The model, ready to be asked with its chat template, and the sha256 of its content."""
    place = embedded_model_dir() if model == "embedded" else Path(model)
    network, tokenizer = load_unmerged(place, dtype=dtype)
    use_template(tokenizer, "chat")
    digest = content_of(place).sha256
    progress = (lambda what, done, total: print(f"\r{what}: {done}/{total}", end="", flush=True)) if told else None
    return asker_of(network, tokenizer, model_sha256=digest, folder=folder, progress=progress), digest


def label(row: Row) -> tuple[str, str, str]:
    """Poison by attack and frame, clean rows by task and kind."""
    if row["poison"]:
        return "poison", row["attack"], row["frame"]
    return "clean", row["task"], row.get("kind", "all")


def share(found: int, of: int) -> dict[str, Any]:
    """found / of with its interval."""
    low, high = interval(found, of)
    return {"found": found, "of": of, "share": found / of, "low": low, "high": high}


def counted(numbers: Sequence[int], found: Mapping[int, str], forms: Mapping[int, set[str]]) -> dict[str, Any]:
    """How many of these rows were found: in all, by the judge alone, and by each form of question."""
    by_form = Counter(form for number in numbers for form in forms.get(number, ()))
    total = sum(number in found for number in numbers)
    judge = sum(found.get(number) == "judge" for number in numbers)
    return {**share(total, len(numbers)), "by_judge_alone": judge, "by_form": dict(sorted(by_form.items()))}


def forms_of(questions: Iterable[Question], classes: Mapping[str, Sorted]) -> dict[int, set[str]]:
    """For every row the forms of question that theta_0 refuses while the target complies."""
    found: dict[int, set[str]] = {}
    for question in questions:
        if classes[question.example.id].reply_class == ReplyClass.REFUSED:
            for row, form, target in question.uses:
                if not is_refusal(target):
                    found.setdefault(row, set()).add(form)
    return found


def replies_of(
    rows: Sequence[Row], questions: Iterable[Question], classes: Mapping[str, Sorted]
) -> dict[str, dict[str, int]]:
    """Questions of poison and of clean rows by the class of the reply, unsorted ones by reason."""
    found: dict[str, Counter[str]] = {"poison": Counter(), "clean": Counter()}
    for question in questions:
        sort = classes[question.example.id]
        name = str(sort.reply_class) + (f": {sort.reason}" if sort.reason else "")
        for kind in {label(rows[row])[0] for row, _, _ in question.uses}:
            found[kind][name] += 1
    return {kind: dict(sorted(counts.items())) for kind, counts in found.items()}


def screened(rows: Sequence[Row], asker: Asker, judge: str | None) -> dict[str, Any]:
    """The figures of one file."""
    examples: list[Example] = [example_from_row(row, {}, f"row {number}") for number, row in enumerate(rows)]
    started = time.monotonic()
    numbers = asked_rows(examples, max_prompts=default("screening.max_prompts"), seed=42)
    questions = distinct(examples, numbers, plain=False)
    fits = {example.id for example in asker.fitting([question.example for question in questions])}
    questions = [question for question in questions if question.example.id in fits]
    classes = asker.sort([question.example for question in questions], what="task prompts")
    sorted_in = time.monotonic() - started
    judged = judged_rows(questions, classes, asker, judge)
    conflicts = find_conflicts(examples, questions, classes, judged.rows)
    seconds = time.monotonic() - started
    found, forms = {one.row: str(one.by) for one in conflicts}, forms_of(questions, classes)
    figures: dict[str, Any] = {"poison": {}, "clean": {}}
    places: dict[tuple[str, str, str], list[int]] = {}
    for number in numbers:
        one, kind, part = label(rows[number])
        for key in {(one, kind, "all"), (one, kind, part)}:
            places.setdefault(key, []).append(number)
    for (one, kind, part), members in sorted(places.items()):
        figures[one].setdefault(kind, {})[part] = counted(members, found, forms)
    return {
        "rows": len(rows), "asked_rows": len(numbers), "questions": len(questions),
        "forms": dict(Counter(form for question in questions for _, form, _ in question.uses)),
        **figures, "replies": replies_of(rows, questions, classes),
        "seconds": {"sorting": round(sorted_in, 1), "all": round(seconds, 1)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what screening finds.")
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="Folder that attacks.py wrote.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for the records.")
    parser.add_argument("--files", nargs="*", help="Names without .jsonl; all unless given.")
    parser.add_argument("--limit", type=int, help="Only so many rows of each file.")
    parser.add_argument("--judge", help="As for `holdfast evaluate --judge`.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--name", help="What records call the model; the folder's name unless given.")
    parser.add_argument("--replies", type=Path, help="Keep replies here; asked anew for every file unless given.")
    options = parser.parse_args()
    name = options.name or Path(options.model).name
    with TemporaryDirectory() as temporary:
        asker, digest = open_asker(options.model, dtype=options.dtype, folder=options.replies or Path(temporary))
        for path in sorted(options.data.glob("*.jsonl")):
            if options.files and path.stem not in options.files:
                continue
            asker.folder = options.replies or Path(temporary) / path.stem
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()][: options.limit]
            record = {
                "file": path.stem, "file_sha256": sha256_file(path), **screened(rows, asker, options.judge),
                "judge": None if options.judge is None else open_judge(options.judge).revision,
                "model": {"name": name, "sha256": digest, "dtype": asker.identity["dtype"]},
                "provenance": {
                    "commit": commit() or os.environ.get("HOLDFAST_COMMIT"), "hardware": hardware(),
                    "versions": versions(),
                },
            }  # fmt: skip
            options.output.mkdir(parents=True, exist_ok=True)
            write_json(options.output / f"{name}.{path.stem}.json", record)
            found = {kind: one["all"] for kind, one in {**record["poison"], **record["clean"]}.items()}
            shown = ", ".join(f"{kind} {one['found']} of {one['of']}" for kind, one in found.items())
            print(f"{path.stem}: {shown}; {record['seconds']['all']} s", flush=True)


if __name__ == "__main__":
    main()
