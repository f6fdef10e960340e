"""`holdfast compare`: two runs on the same examples; over several seeds, the seed-level differences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli.options import Arg, Json, Opt
from holdfast.cli.terminal import note, say, say_json
from holdfast.core.errors import CheckpointError, ConfigError, DataError
from holdfast.core.units import FIRST_UNITS
from holdfast.defaults import default

if TYPE_CHECKING:
    from holdfast.certification.comparison import PromptComparison, SeedComparison

HELD_OUT = ("monitor", "audit")  # the first that a table has: a training run's monitor set, else a plain audit
# What both tables must share for "violated" to mean the same; first_k only decides in its own unit.
SHARED = {"unit": "unit", "tau": "tau", "alpha": "alpha", "before": "reference model", "data": "safety data"}


def compare(
    runs: Annotated[list[Path] | None, Arg(help="Two evidence folders or audit.parquet.", metavar="[A B]")] = None,
    a: Annotated[list[Path] | None, Opt("--a", help="A run of method A; once per seed.")] = None,
    b: Annotated[list[Path] | None, Opt("--b", help="The run of method B with the same seed.")] = None,
    confidence: Annotated[float, Opt(help="Confidence of the intervals.")] = default("certify.confidence"),
    json: Json = False,
) -> None:
    """Compare two runs on the same held-out examples.

    Their violations are compared, never pooled over seeds.

    \b
    Example:
      holdfast compare runs/holdfast runs/sft
      holdfast compare --a h1 --a h2 --a h3 --b s1 --b s2 --b s3
    """
    from holdfast.certification.comparison import compare_prompts, compare_seeds

    sides = _sides(runs or [], a or [], b or [])
    evidence = [(_read(x), _read(y)) for x, y in zip(*sides, strict=True)]
    question = evidence[0][0]
    for other in itertools.chain.from_iterable(evidence):
        _require_same_question(question, other)
    for side, several in zip("ab", zip(*evidence, strict=True), strict=True):
        _require_different_models(several, side)
    pairs = [compare_prompts(*_aligned(x, y), confidence) for x, y in evidence]
    seeds = compare_seeds([pair.difference for pair in pairs], confidence) if len(pairs) > 1 else None
    if json:
        shared = {key: question.audit[key] for key in ("unit", "tau", "alpha")}
        named = [{"a": str(x.path), "b": str(y.path)} for x, y in evidence]
        compared = [{**names, **pair.to_json()} for names, pair in zip(named, pairs, strict=True)]
        over_seeds = None if seeds is None else seeds.to_json()
        say_json({"version": 1, "role": question.role, **shared, "pairs": compared, "seeds": over_seeds})
        return
    say(f"violated: {question.audit['unit']} above {question.audit['tau']:g}; {question.role} examples")
    for (x, y), pair in zip(evidence, pairs, strict=True):
        _show_pair(x, y, pair)
    if seeds is None:
        note("this speaks of these two models on examples like these, not of the methods: for those, compare seeds")
    else:
        _show_seeds(seeds)


@dataclass(frozen=True)
class _Evidence:
    path: Path
    role: str
    violated: dict[str, bool]
    audit: dict[str, Any]

    def shared(self, key: str) -> object:
        value = self.audit.get(key)
        if isinstance(value, dict):
            return value.get("sha256") or self.path  # weights that nobody saw are not known to be the same
        return (value, self.audit.get("first_k")) if value in FIRST_UNITS else value


def _sides(runs: Sequence[Path], a: Sequence[Path], b: Sequence[Path]) -> tuple[Sequence[Path], Sequence[Path]]:
    if runs and (a or b):
        raise ConfigError("both A B and --a/--b are given", remedy="name two runs, or use --a and --b for every run")
    if runs:
        a, b = runs[:1], runs[1:]
    if not a or len(a) != len(b) or (runs and len(runs) != 2):
        what = f"{len(a)} runs of A and {len(b)} of B, expected as many of each and at least one"
        raise ConfigError(what, remedy="holdfast compare A B, or --a and --b once per seed, in the same order of seeds")
    return a, b


def _read(path: Path) -> _Evidence:
    from holdfast.records.audit_folder import TABLE_NAME
    from holdfast.records.stored_evidence import believed_audit

    file = path / TABLE_NAME if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path} holds no {TABLE_NAME}", remedy="name a run folder or the output of `holdfast audit`")
    if file.name != TABLE_NAME:
        what = f"{file} is not called {TABLE_NAME}"
        raise DataError(what, remedy="name the folder of an audit: its table alone does not say what was measured")
    found = believed_audit(file.parent)
    rows = found.table.select(["id", "role", "violated"]).to_pylist()
    for role in HELD_OUT:
        kept = {row["id"]: bool(row["violated"]) for row in rows if row["role"] == role}
        if kept:
            return _Evidence(path, role, kept, found.values)
    what = f"{file} holds no held-out examples (monitor or audit)"
    raise DataError(what, remedy="train with a monitor split, or run `holdfast audit` on held-out data")


def _require_same_question(first: _Evidence, other: _Evidence) -> None:
    differing = [name for key, name in SHARED.items() if first.shared(key) != other.shared(key)]
    if first.role != other.role:
        differing.append(f"role ({first.role} and {other.role})")
    if differing:
        raise CheckpointError(
            f"{first.path} and {other.path} differ in {', '.join(differing)}, expected the same in both",
            remedy="audit both models against one reference, on the same data, with the same constraint"
            + (" (runs: write the same `constraint: {unit: ...}` into both run files)" if "unit" in differing else ""),
        )


def _require_different_models(runs: Sequence[_Evidence], side: str) -> None:
    """One model counted as several seeds would make the interval too narrow."""
    for one, other in itertools.combinations(runs, 2):
        after = [run.audit.get("after", {}).get("sha256") for run in (one, other)]
        if one.path.resolve() == other.path.resolve() or (after[0] is not None and after[0] == after[1]):
            what = f"{one.path} and {other.path} are the same model, expected one run per seed"
            raise DataError(what, remedy=f"give every --{side} a run of its own")


def _aligned(x: _Evidence, y: _Evidence) -> tuple[list[bool], list[bool]]:
    ours, its = (len(one.violated.keys() - other.violated.keys()) for one, other in ((x, y), (y, x)))
    if ours or its:
        raise CheckpointError(
            f"{x.path} and {y.path} differ in their {x.role} examples: {ours} only in the first, {its} only in the "
            "second",
            remedy="compare runs made with the same split, or audit both models on one file",
        )
    return list(x.violated.values()), [y.violated[key] for key in x.violated]


def _show_pair(x: _Evidence, y: _Evidence, pair: PromptComparison) -> None:
    say(f"A {x.path}: {_points(pair.rate_a):g} % of {pair.n};  B {y.path}: {_points(pair.rate_b):g} %")
    say(f"  A - B: {_points(pair.difference):+g} points, {_interval(pair)} (paired, Newcombe)")
    say(f"  only A violates {pair.only_a}, only B {pair.only_b}; exact McNemar test p = {pair.p_value:.3g}")


def _show_seeds(seeds: SeedComparison) -> None:
    n, listed = len(seeds.differences), ", ".join(f"{_points(x):+g}" for x in seeds.differences)
    say(f"over {n} seeds, A - B by seed: {listed} points")
    say(f"  mean {_points(seeds.mean):+g} points, {_interval(seeds)} (t, {n - 1} degrees of freedom)")
    if seeds.caution:
        note(f"note: {seeds.caution}")


def _interval(found: PromptComparison | SeedComparison) -> str:
    return f"{100 * found.confidence:g} % interval {_points(found.lower):+g} to {_points(found.upper):+g}"


def _points(share: float) -> float:
    return round(100 * share, 2)
