"""The records of the experiment as Markdown: one row a run, what the gate said by behaviour and by likelihood.

    python -m benchmarks.behaviour_gate.table benchmarks/results/behaviour_gate --page docs/evidence.md

writes between `<!-- behaviour gate -->` and `<!-- end -->` of the page, or prints where no page is named.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.markdown_width import fit

from holdfast.certification.binomial import upper_bound
from holdfast.core.files import read_json, write_text
from holdfast.core.percent import percent, percent_up

START, END = "<!-- behaviour gate -->", "<!-- end -->"
HEAD = (
    "| run | seed | N | M | K | unclear | bound | opened once | exit code | n | k | bound | opened once | exit code |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)
NOTHING = "-"
Record = Mapping[str, Any]


def read_records(folder: Path) -> list[Record]:
    """Every record of the folder: holdfast after plain SFT, by seed."""
    found = [read_json(path) for path in sorted(folder.glob("*.json"))]
    records = [record for record in found if record.get("kind") in ("certificate", "training")]
    return sorted(records, key=lambda record: (record["run"] == "holdfast", record["seed"], record.get("by", "")))


def counts(figures: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(failures, units) of every test behind a verdict: over groups of near-duplicates and over prompts."""
    tests = [figures[name] for name in ("groups", "rows") if figures.get(name)]
    return [(test["regressions"], test["n"]) for test in tests or [figures]]


def opened_once(figures: Mapping[str, Any]) -> float:
    """The bound for whoever certifies this one model alone: the larger of the tests' Clopper-Pearson bounds."""
    return max(upper_bound(k, n, figures["confidence"]) for k, n in counts(figures))


def bound(figures: Mapping[str, Any]) -> float:
    """The certificate's bound, at its part of the allowed error."""
    declared = figures["openings"]["declared"]
    return max(upper_bound(k, n, figures["confidence"], parts=declared) for k, n in counts(figures))


def cells(record: Record | None) -> list[str]:
    """Units, failures, both bounds and the exit code of one certificate."""
    if record is None:
        return [NOTHING] * 5
    figures = record["figures"]
    if not figures:
        return [*[NOTHING] * 4, str(record["exit_code"])]
    failures, units = counts(figures)[0]
    return [
        str(units), str(failures), percent_up(bound(figures)), percent_up(opened_once(figures)),
        str(record["exit_code"]),
    ]  # fmt: skip


def row(run: str, seed: int, behaviour: Record | None, likelihood: Record | None) -> str:
    """One run."""
    replies = ((behaviour or {}).get("figures") or {}).get("behaviour") or {}
    units, failures, *rest = cells(behaviour)
    asked, unclear = str(replies.get("prompts", NOTHING)), str(replies.get("unclear", NOTHING))
    return "| " + " | ".join([run, str(seed), asked, units, failures, unclear, *rest, *cells(likelihood)]) + " |"


def table(records: Sequence[Record]) -> list[str]:
    """The table's lines."""
    found = {(r["run"], r["seed"], r["by"]): r for r in records if r["kind"] == "certificate"}
    runs = list(dict.fromkeys((run, seed) for run, seed, _ in found))
    return [*HEAD, *(row(*one, found.get((*one, "behaviour")), found.get((*one, "likelihood"))) for one in runs)]


def training(records: Sequence[Record]) -> list[str]:
    """What each run measured of its own limit."""
    lines = []
    for record in records:
        for entry in record.get("safety", {}).values():
            share = percent(entry["monitor"]["violation_rate"] or 0.0)
            lines.append(
                f"* {record['run']}, seed {record['seed']}: exit code {record['exit_code']}, {share} of "
                f"{entry['monitor']['n']:.0f} monitored refusals of its own safety set moved by more than "
                f"{entry['tau']:g} ({entry['unit']})"
            )
    return lines


def without_certificate(records: Sequence[Record]) -> list[str]:
    """Why there are no figures, where there are none."""
    return [
        f"* {record['run']}, seed {record['seed']}, by {record['by']}: no certificate; `{record['message']}`"
        for record in records
        if record["kind"] == "certificate" and not record["figures"]
    ]


def provenance(records: Sequence[Record]) -> str:
    """Model, code, hardware and time in one line."""
    model, made = records[0]["model"], [record["provenance"] for record in records]
    commits = ", ".join(sorted({str(one["commit"]) for one in made}))
    hardware = ", ".join(sorted({one["hardware"] for one in made}))
    packages = made[0]["versions"]
    seconds = {
        kind: [r["seconds"] for r in records if r.get("by", r["kind"]) == kind]
        for kind in ("training", "behaviour", "likelihood")
    }
    took = ", ".join(f"{kind} {min(s):.0f} to {max(s):.0f} s" for kind, s in seconds.items() if s)
    return (
        f"{model['name']} (from the GGUF file with sha256 {model['gguf_sha256'][:12]}), commit {commits}, {hardware}, "
        f"torch {packages.get('torch')}, transformers {packages.get('transformers')}; a process each, several at once: "
        f"{took}."
    )


def commands(records: Sequence[Record]) -> list[str]:
    """The commands of the first holdfast run; the others differ in run and seed."""
    chosen = [r for r in records if r["run"] == "holdfast" and r["seed"] == records[0]["seed"]]
    order = {"training": 0, "behaviour": 1, "likelihood": 2}
    return [continued(r["command"]) for r in sorted(chosen, key=lambda r: order[r.get("by", r["kind"])])]


def continued(command: str) -> str:
    """Over several lines, as a shell takes it."""
    return " \\\n".join(textwrap.wrap(command, 110, subsequent_indent="  ", break_on_hyphens=False))


def page(records: Sequence[Record]) -> str:
    """Everything that stands between the markers."""
    issued = [r["figures"] for r in records if r["kind"] == "certificate" and r["figures"]]
    alpha, declared = (issued[0]["alpha"], issued[0]["openings"]["declared"]) if issued else (NOTHING, NOTHING)
    legend = (
        f"alpha = {alpha}. N prompts asked; M groups of near-duplicates that the model before refused, K of them with "
        "a prompt that the model after does not refuse. n groups of pairs, k of them with a reply that lost more than "
        f"0.1 nats per token. Bound: of the failing share, with 95 % confidence for all {declared} certificates "
        "together; opened once: for one certificate alone. Exit code 0: certified, 4: not."
    )
    lines = [
        "```", *commands(records), "```", "", *table(records), "", legend, "", *training(records),
        *without_certificate(records), "", provenance(records),
    ]  # fmt: skip
    return fit("\n".join(lines))


def rewritten(text: str, content: str) -> str:
    """The page with new content between its markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"the page has no {START} ... {END}")
    return f"{before}{START}\n{content}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the table of the behaviour gate's experiment.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, help="Markdown page with the markers.")
    options = parser.parse_args()
    content = page(read_records(options.results))
    if options.page is None:
        print(content)
    else:
        write_text(options.page, rewritten(options.page.read_text("utf-8"), content))


if __name__ == "__main__":
    main()
