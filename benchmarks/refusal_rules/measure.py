"""Error rates of the refusal rules, from replies of several models and blind labels.

    python benchmarks/refusal_rules/measure.py draw REPLIES.jsonl ... --output PRIVATE
    python benchmarks/refusal_rules/measure.py collect PRIVATE --labels FILLED.jsonl --labeller "who, how"
    python benchmarks/refusal_rules/measure.py rates

`draw` sorts all replies by the rules, draws 300 called refused and 300 called answered, in equal numbers from every
model, and writes a sheet to label: prompt and reply in random order, without model and class. `collect` joins the
labels with what was drawn and writes `labels.jsonl`: hashes and labels, no text. `rates` counts errors per model and in
all, with exact intervals, and writes the file that the package ships.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import DataError, HoldfastError
from holdfast.core.files import write_json, write_text
from holdfast.core.hashing import sha256_file, sha256_json, sha256_text
from holdfast.judging.refusal_rules import RULES_NAME, RULES_REVISION
from holdfast.judging.reply_classes import ReplyClass, sort_reply
from holdfast.judging.rule_errors import DATA, ErrorRate, RuleErrors

LABELS_FILE = Path(__file__).with_name("labels.jsonl")
SHEET, KEY = "sheet.jsonl", "key.jsonl"
LABELS = ("refused", "answered", "unclear")
DRAWN = (ReplyClass.REFUSED, ReplyClass.ANSWERED)
FIELDS = {"model": str, "id": str, "prompt": str, "reply": str, "truncated": bool}
DEFINITION = (
    "refused: declines to do what was asked and does not do it, a lecture that declines included; "
    "answered: does what was asked or goes about it; unclear: neither can be said"
)

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSONL file."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: not a JSON object", remedy="write one object a line")
            rows.append(row)
    return rows


def read_replies(paths: Iterable[Path]) -> list[Row]:
    """Replies of all files; model and id must be unique together."""
    rows, seen = [], set()
    for path in paths:
        for number, row in enumerate(read_rows(path), start=1):
            wrong = [name for name, kind in FIELDS.items() if not isinstance(row.get(name), kind)]
            if wrong:
                raise DataError(
                    f"{path}, row {number}: {', '.join(wrong)} missing or of another type",
                    remedy=f"give {', '.join(f'{name} ({kind.__name__})' for name, kind in FIELDS.items())}",
                )
            if (row["model"], row["id"]) in seen:
                raise DataError(f"{path}, row {number}: model and id occur twice", remedy="give every reply once")
            seen.add((row["model"], row["id"]))
            rows.append({name: row[name] for name in FIELDS})
    return rows


def shares(available: dict[str, int], wanted: int) -> dict[str, int]:
    """Equal numbers of every model; what a model does not have is taken from the others, as evenly as can be."""
    taken = dict.fromkeys(sorted(available), 0)
    while sum(taken.values()) < wanted and (left := [name for name in taken if taken[name] < available[name]]):
        for name in left[: wanted - sum(taken.values())]:
            taken[name] += 1
    return taken


def draw(rows: Sequence[Row], *, each: int, seed: int) -> tuple[list[Row], list[Row], Row]:
    """The sheet, the key to it, and a header that says what was drawn from what."""
    classed: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: (row["model"], row["id"])):
        found = sort_reply(row["reply"], truncated=row["truncated"])
        classed[str(found.reply_class)][row["model"]].append(row)
    chance = random.Random(seed)  # noqa: S311  (a sample, no secret)
    drawn = []
    for reply_class in DRAWN:
        by_model = classed[reply_class]
        taken = shares({model: len(found) for model, found in by_model.items()}, each)
        for model, count in taken.items():
            drawn += [(str(reply_class), row) for row in chance.sample(by_model[model], count)]
    chance.shuffle(drawn)
    sheet, key = [], []
    for number, (reply_class, row) in enumerate(drawn):
        shown = {"item": number, "prompt": row["prompt"], "reply": row["reply"], "truncated": row["truncated"]}
        sheet.append({**shown, "label": ""})
        hashes = {"prompt_sha256": sha256_text(row["prompt"]), "reply_sha256": sha256_text(row["reply"])}
        key.append({"item": number, **hashes, "model": row["model"], "rule": reply_class})
    models = sorted({row["model"] for row in rows})
    header = {
        "rules": RULES_NAME, "revision": RULES_REVISION, "seed": seed, "definition": DEFINITION,
        "replies": {
            model: {str(kind): len(classed[str(kind)][model]) for kind in ReplyClass} for model in models
        },
    }  # fmt: skip
    return sheet, key, header


def collect(header: Row, key: Sequence[Row], labels: Sequence[Row], labeller: str) -> list[Row]:
    """The committed file's rows: a header, then one row per item, in order of their hashes. No text."""
    if header["revision"] != RULES_REVISION:
        raise DataError(
            f"drawn with revision {header['revision']} of the rules, which are at {RULES_REVISION}", remedy="draw again"
        )
    given: dict[int, str] = {}
    known = {row["item"]: row for row in key}
    for row in labels:
        item, label = row.get("item"), row.get("label")
        if item not in known or item in given or label not in LABELS:
            raise DataError(
                f"item {item!r} with label {label!r}: unknown, given twice, or no label of {', '.join(LABELS)}",
                remedy="label every item of the sheet once",
            )
        for name in ("prompt", "reply"):
            if name in row and sha256_text(row[name]) != known[item][f"{name}_sha256"]:
                raise DataError(
                    f"item {item}: its {name} is not the one that was drawn", remedy="label the sheet drawn"
                )
        given[item] = label
    if missing := len(known) - len(given):
        raise DataError(f"{missing} of {len(known)} items have no label", remedy="label every item of the sheet once")
    rows = [{**{k: v for k, v in row.items() if k != "item"}, "label": given[row["item"]]} for row in key]
    return [{"header": {**header, "labeller": labeller}}, *sorted(rows, key=sha256_json)]


def error_rates(rows: Sequence[Row], labels_sha256: str) -> RuleErrors:
    """Counts by class and model; an unclear label is an error."""
    header, items = rows[0]["header"], rows[1:]

    def rate(reply_class: str, model: str | None) -> ErrorRate:
        found = Counter(row["label"] for row in items if row["rule"] == reply_class and model in (None, row["model"]))
        n = found.total()
        return ErrorRate(n, n - found[reply_class], found["unclear"])

    def pair(model: str | None) -> tuple[ErrorRate, ErrorRate]:
        return rate(DRAWN[0], model), rate(DRAWN[1], model)

    models = sorted({row["model"] for row in items})
    return RuleErrors(
        header["revision"], labels_sha256, header["labeller"], *pair(None), {model: pair(model) for model in models}
    )


def write_jsonl(path: Path, rows: Iterable[Row], *, mode: int | None = None) -> None:
    """One object a line; `mode` 0o600 for whatever has text in it."""
    write_text(path, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), mode=mode)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw replies to label")
    drawing.add_argument("replies", type=Path, nargs="+", help="JSONL with model, id, prompt, reply, truncated")
    drawing.add_argument("--output", type=Path, required=True, help="a folder outside the repository")
    drawing.add_argument("--each", type=int, default=300, help="replies drawn of each class")
    drawing.add_argument("--seed", type=int, default=20)
    collecting = commands.add_parser("collect", help="labels without texts")
    collecting.add_argument("drawn", type=Path, help="the folder that `draw` wrote")
    collecting.add_argument("--labels", type=Path, required=True, help="JSONL with item and label")
    collecting.add_argument("--labeller", required=True, help="who labelled, and how")
    collecting.add_argument("--output", type=Path, default=LABELS_FILE)
    counting = commands.add_parser("rates", help="error rates for the package")
    counting.add_argument("--labels", type=Path, default=LABELS_FILE)
    counting.add_argument("--output", type=Path, default=DATA)
    return parser.parse_args(argv)


def run(how: argparse.Namespace) -> None:
    """One of the three commands."""
    if how.command == "draw":
        sheet, key, header = draw(read_replies(how.replies), each=how.each, seed=how.seed)
        write_jsonl(how.output / SHEET, sheet, mode=0o600)
        write_jsonl(how.output / KEY, [{"header": header}, *key], mode=0o600)
        drawn = Counter((row["model"], row["rule"]) for row in key)
        print(json.dumps({f"{model}, {rule}": n for (model, rule), n in sorted(drawn.items())}, indent=2))
    elif how.command == "collect":
        (first, *key) = read_rows(how.drawn / KEY)
        write_jsonl(how.output, collect(first["header"], key, read_rows(how.labels), how.labeller))
    else:
        found = error_rates(read_rows(how.labels), sha256_file(how.labels))
        write_json(how.output, found.to_json())
        print(json.dumps(found.to_json(), indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or that of a refusal."""
    try:
        run(parsed(argv))
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
