"""`holdfast compare`: two runs on the same examples; over several seeds, the seed-level differences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
UNNAMED = ""  # the safety set of an audit, or of a run with one set
# What all tables must share for "violated" to mean the same; first_k only decides in its own unit.
SHARED = {"unit": "unit", "tau": "tau", "alpha": "alpha", "before": "reference model"}
# And the two of a pair; a run of another seed may split the data in another way.
OF_PAIR = {"data": "safety data"}
SAME_IN_RUNS = {
    "unit": "write the same `constraint: {unit: ...}` into both run files",
    "safety data": "the same `conflicts`, `safety` and `seed` hold out the same prompts",
}


def compare(
    runs: Annotated[
        list[Path] | None, Arg(help="Two runs, evidence folders or audit.parquet.", metavar="[A B]")
    ] = None,
    a: Annotated[list[Path] | None, Opt("--a", help="A run of method A; once per seed.")] = None,
    b: Annotated[list[Path] | None, Opt("--b", help="The run of method B with the same seed.")] = None,
    confidence: Annotated[float, Opt(help="Confidence of the intervals.")] = default("certify.confidence"),
    json: Json = False,
) -> None:
    """Compare two runs on the same held-out examples.

    Their violations are compared by safety set, never pooled over sets or seeds.

    \b
    Example:
      holdfast compare runs/holdfast runs/sft
      holdfast compare --a h1 --a h2 --a h3 --b s1 --b s2 --b s3
    """
    sides = _sides(runs or [], a or [], b or [])
    found = [(path, _folders(path)) for pair in zip(*sides, strict=True) for path in pair]
    names, only = _shared(found)
    each = [folders for _, folders in found]
    pairs = list(zip(each[::2], each[1::2], strict=True))
    compared = [_compare_set(name, [(x[name], y[name]) for x, y in pairs], confidence) for name in names]
    if json:
        sets = [one.to_json() for one in compared]
        say_json({"version": 1, **(sets[0] if names == [UNNAMED] else {"sets": sets, "not_compared": only})})
        return
    for one in compared:
        one.show()
    for run, left in only.items():
        note(f"not compared, since not every run has it: {', '.join(left)} of {run}")
    if compared[0].seeds is None:
        note("this speaks of these two models on examples like these, not of the methods: for those, compare seeds")


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


@dataclass(frozen=True)
class _Compared:
    """One safety set: what was read of it, the comparison of each pair of runs, and that over the seeds."""

    name: str
    evidence: list[tuple[_Evidence, _Evidence]]
    pairs: list[PromptComparison]
    seeds: SeedComparison | None

    def to_json(self) -> dict[str, Any]:
        question = self.evidence[0][0]
        shared = {key: question.audit[key] for key in ("unit", "tau", "alpha")}
        named = [{"a": str(x.path), "b": str(y.path)} for x, y in self.evidence]
        pairs = [{**names, **pair.to_json()} for names, pair in zip(named, self.pairs, strict=True)]
        over_seeds = None if self.seeds is None else self.seeds.to_json()
        of_set = {} if self.name == UNNAMED else {"set": self.name}
        return {**of_set, "role": question.role, **shared, "pairs": pairs, "seeds": over_seeds}

    def show(self) -> None:
        question = self.evidence[0][0]
        of_set = "" if self.name == UNNAMED else f"safety set {self.name}; "
        say(f"{of_set}violated: {question.audit['unit']} above {question.audit['tau']:g}; {question.role} examples")
        for (x, y), pair in zip(self.evidence, self.pairs, strict=True):
            _show_pair(x, y, pair)
        if self.seeds is not None:
            _show_seeds(self.seeds)


def _compare_set(name: str, folders: Sequence[tuple[Path, Path]], confidence: float) -> _Compared:
    from holdfast.certification.comparison import compare_prompts, compare_seeds

    evidence = [(_read(x), _read(y)) for x, y in folders]
    for x, y in evidence:
        _require_same_question(x, y, SHARED | OF_PAIR)
        _require_same_question(evidence[0][0], x, SHARED)
    for side, several in zip("ab", zip(*evidence, strict=True), strict=True):
        _require_different_models(several, side)
    pairs = [compare_prompts(*_aligned(x, y), confidence) for x, y in evidence]
    seeds = compare_seeds([pair.difference for pair in pairs], confidence) if len(pairs) > 1 else None
    return _Compared(name, evidence, pairs, seeds)


def _sides(runs: Sequence[Path], a: Sequence[Path], b: Sequence[Path]) -> tuple[Sequence[Path], Sequence[Path]]:
    if runs and (a or b):
        raise ConfigError("both A B and --a/--b are given", remedy="name two runs, or use --a and --b for every run")
    if runs:
        a, b = runs[:1], runs[1:]
    if not a or len(a) != len(b) or (runs and len(runs) != 2):
        what = f"{len(a)} runs of A and {len(b)} of B, expected as many of each and at least one"
        raise ConfigError(what, remedy="holdfast compare A B, or --a and --b once per seed, in the same order of seeds")
    return a, b


def _folders(path: Path) -> dict[str, Path]:
    """By safety set, where its audit lies: one without a name, or those of a finished run whose sets have names."""
    from holdfast.records.audit_folder import TABLE_NAME
    from holdfast.records.run_record import SINGLE, set_folder
    from holdfast.records.stored_evidence import believed_result

    if (path / TABLE_NAME if path.is_dir() else path).is_file():
        return {UNNAMED: path}
    measured = (believed_result(path) or {}).get("safety") if path.is_dir() else None
    if not isinstance(measured, Mapping) or not set(measured) - {SINGLE}:
        remedy = "name the folder of a finished run or the output of `holdfast audit`"
        raise DataError(f"{path} holds no {TABLE_NAME}", remedy=remedy)
    return {name: set_folder(path, name, named=True) for name in measured}


def _shared(found: Sequence[tuple[Path, dict[str, Path]]]) -> tuple[list[str], dict[str, list[str]]]:
    """The safety sets that every run has, and by run the others."""
    names = [name for name in found[0][1] if all(name in folders for _, folders in found)]
    if not names:
        listed = "; ".join(f"{path}: {', '.join(folders) if UNNAMED not in folders else 'one set'}"
                           for path, folders in found)  # fmt: skip
        raise DataError(
            f"the runs have no safety set in common ({listed})",
            remedy="name the folders of the two sets that hold the same examples, for example RUN/refusals",
        )
    only = {str(path): [name for name in folders if name not in names] for path, folders in found}
    return names, {path: left for path, left in only.items() if left}


def _read(path: Path) -> _Evidence:
    from holdfast.records.audit_folder import TABLE_NAME
    from holdfast.records.stored_evidence import believed_audit

    file = path / TABLE_NAME if path.is_dir() else path
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


def _require_same_question(first: _Evidence, other: _Evidence, shared: Mapping[str, str]) -> None:
    differing = [name for key, name in shared.items() if first.shared(key) != other.shared(key)]
    if first.role != other.role:
        differing.append(f"role ({first.role} and {other.role})")
    if differing:
        raise CheckpointError(
            f"{first.path} and {other.path} differ in {', '.join(differing)}, expected the same in both",
            remedy="audit both models against one reference, on the same data, with the same constraint"
            + "".join(f" (runs: {hint})" for name, hint in SAME_IN_RUNS.items() if name in differing),
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
