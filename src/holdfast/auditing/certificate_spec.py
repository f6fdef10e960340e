"""What a certificate is asked: which two models, compared how and tested how; and on which prompts.

The prompts are there once each, in groups of near-duplicates, and were not seen in training.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from holdfast.auditing.endpoint import refuse_endpoints
from holdfast.auditing.pair import Pair, open_pair
from holdfast.certification.arguments import confidence_level, count
from holdfast.certification.behaviour import BETWEEN, Claimed
from holdfast.certification.blocks import LeakSearch, Measured, Settings
from holdfast.certification.ledger_state import JUDGE, Claim
from holdfast.certification.share import DRAWN
from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, DataError, HoldfastError, UnsupportedError
from holdfast.core.hashing import sha256_file, sha256_json, sha256_lines
from holdfast.core.registry import nearest
from holdfast.data.examples import Example, as_chat, normalise, prompt_text, searchable_texts, uniform
from holdfast.data.near_duplicates import clusters
from holdfast.data.rows import OtherColumnsError
from holdfast.data.shingles import prompt_marks
from holdfast.data.sources import prompt_key, read_examples
from holdfast.data.sources import read_prompts as prompts_alone
from holdfast.data.split_record import RECORD_NAME, load_record
from holdfast.data.splits import require_unseen
from holdfast.records.certificate import KINDS, UNITS, WAYS, CertificateRecord
from holdfast.records.yaml_file import read_yaml
from holdfast.screening.record import FIGURES, FOLDER, RECORD, load_finished

logger = logging.getLogger(__name__)

CLAIMED = ("template", "tokenizer", "max_length", "dtype")  # settings that change a degradation
MEASURED = frozenset({JUDGE, "replies", "log"})  # how replies were made, judged or sorted


@dataclass(frozen=True)
class Setup:
    """How prompts are read (`reading`: options of `read_examples`) and models loaded, with the names of `audit`."""

    template: str = "chat"
    tokenizer: str = "same"
    max_length: int | None = None
    dtype: str = "auto"
    device: str | None = None
    before_revision: str | None = None
    after_revision: str | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.template not in ("chat", "none"):
            raise ConfigError(f"template is {self.template!r}", remedy="use chat or none")

    def to_json(self) -> Settings:
        """What the certificate records: all but the device."""
        return {
            "template": self.template, "tokenizer": self.tokenizer, "max_length": self.max_length, "dtype": self.dtype,
            "before_revision": self.before_revision, "after_revision": self.after_revision,
            "reading": dict(self.reading), "trust_remote_code": self.trust_remote_code,
        }  # fmt: skip


@dataclass(frozen=True)
class CertificateSpec:
    """Everything that decides what is certified, but for the prompts; the names are those of `open_certify`.

    `claims` is what a behaviour certificate claims was kept, `measured` how replies were made, judged or sorted, as the
    claim records it.
    """

    before: str | Path
    after: str | Path
    constraint: ChanceConstraint
    by: str = "likelihood"
    kind: str = "fixed"
    confidence: float = 0.95
    pool: int | None = None
    drawn: str = "groups"
    max_weight: int | None = None
    claims: tuple[Claimed, ...] = (Claimed.REFUSALS,)
    setup: Setup = field(default_factory=Setup)
    measured: Measured = field(default_factory=Measured)

    def __post_init__(self) -> None:
        for name, value, known in (("by", self.by, WAYS), ("drawn", self.drawn, DRAWN), ("kind", self.kind, KINDS)):
            if value not in known:
                raise ConfigError(f"certificate: {name} {value!r} is unknown", remedy=nearest(value, list(known)))
        refuse_endpoints((self.before, self.after), "a certificate")
        if (self.pool is not None) != (self.kind == "finite_pool"):
            raise ConfigError(
                f"kind {self.kind} with pool {self.pool}; expected a pool for finite_pool and for no other kind",
                remedy="give the size of the list that the prompts were drawn from (--pool N), or leave it out",
            )
        if self.by in ("behaviour", "log") and self.kind not in ("fixed", "per_category"):
            raise UnsupportedError(
                f"a certificate by {self.by} of kind {self.kind} is not supported: how many prompts it counts is known "
                "only once the model before has been asked all of them",
                remedy="leave out --pool, --anytime and --strength, or certify --by likelihood or kl",
            )
        if self.max_weight is not None:
            count("max_weight", self.max_weight, least=1)
        confidence_level(self.confidence)

    @property
    def unit(self) -> str:
        return str(self.constraint.unit) if self.by in ("kl", "likelihood") else UNITS[self.by][0]

    @property
    def tau(self) -> float:
        """The largest acceptable degradation: a behaviour is kept (0) or lost (1)."""
        return BETWEEN if self.by in ("behaviour", "log") else float(self.constraint.tau)

    @property
    def alpha(self) -> float:
        return float(self.constraint.alpha)

    @property
    def first_k(self) -> int:
        return int(self.constraint.first_k)

    @property
    def settings(self) -> Settings:
        return {**self.setup.to_json(), **self.measured}

    def pair(self) -> Pair:
        """Both models, hashed but not loaded; refused where they are the same, of which nothing can regress."""
        names = ("dtype", "device", "tokenizer", "trust_remote_code", "before_revision", "after_revision")
        pair = open_pair(self.before, self.after, **{name: getattr(self.setup, name) for name in names})
        if pair.before.sha256 == pair.after.sha256:
            raise ConfigError(
                f"before ({self.before}) and after ({self.after}) are the same model, sha256 {pair.before.sha256}: "
                "nothing could be lost, so nothing is shown",
                remedy="name the model that was fine-tuned as --after",
            )
        return pair


def claim_of(
    asked: CertificateSpec | CertificateRecord, before_sha256: str, after_sha256: str, claims: Sequence[Claimed],
    categories: Mapping[str, str | None], keep: Mapping[str, str] | None = None,
) -> Claim:  # fmt: skip
    """The claim that an opening is entered under, before it is measured and again from the certificate.

    Its settings are what changes a degradation or the test. Categories, and what the set of a prompt keeps, both by the
    prompts' ids, are no part of an id, so that sorting prompts into others would else be the same claim.
    """
    how: Mapping[str, object] = asked.settings
    settings = {name: how[name] for name in (*CLAIMED, *(MEASURED & how.keys()))}
    settings |= {"pool": asked.pool, "drawn": asked.drawn, "max_weight": asked.max_weight}
    settings |= {"claims": [claim.unit for claim in claims]}
    hashed = {"keep": keep, "categories": categories if asked.kind == "per_category" else None}
    settings |= {name: sha256_json(sorted(by_id.items())) for name, by_id in hashed.items() if by_id is not None}
    return Claim(
        before_sha256, after_sha256, asked.unit, asked.tau, asked.alpha, asked.first_k, float(asked.confidence),
        asked.kind, settings,
    )  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """What is measured, and what it came from.

    Each example is there once, in file order for a sequence, by id otherwise; `cluster` has the position of the first
    of its near-duplicates, `keep` the class that its safety set keeps where a run's sets are asked together.
    """

    examples: list[Example]
    cluster: list[int]
    data_sha256: str
    keep: list[str] | None = None

    @property
    def ids(self) -> list[str]:
        return [example.id for example in self.examples]

    @property
    def categories(self) -> list[str | None]:
        return [example.category for example in self.examples]

    @cached_property
    def texts(self) -> dict[str, str]:
        """By id, what the prompt is recognised by in the ledger of openings."""
        return prompt_marks(self.examples)


@dataclass(frozen=True)
class Leakage:
    """Whether the prompts were looked for in the training data, which that was, and how many were looked for."""

    checked: bool = False
    against: str | None = None
    prompts: int = 0

    def to_json(self) -> LeakSearch:
        return {"checked": self.checked, "against": self.against, "prompts": self.prompts}


def read_prompts(
    safety: str | Sequence[Example], *, source: str | None = None, reading: Mapping[str, Any] | None = None,
    template: str = "chat", sequential: bool = False, replies: bool = False,
) -> Prompts:  # fmt: skip
    """Read the prompts of a certificate.

    Args:
        safety: a file or hub data set, or examples that came from `source`, which is bound by its content.
        reading: options of `read_examples`.
        sequential: keep the order of the file.
        replies: the prompts are replied to: completions are not looked at, and the same prompt counts once.
    """
    if isinstance(safety, str):
        source, given = safety, (prompts_alone if replies else read_examples)(safety, **dict(reading or {}))
    else:
        given = list(safety)
    if not given:
        raise DataError("there are no prompts to certify on", remedy="give the certify share a fraction above 0")
    first: dict[str, Example] = {}
    for example in given:
        first.setdefault(prompt_key(example) if replies else example.id, example)
    unique = list(first.values()) if sequential else sorted(first.values(), key=lambda example: example.id)
    labels = clusters([prompt_text(e) for e in unique])
    shaped = [as_chat(example) for example in unique] if template == "chat" else uniform(unique)
    return Prompts(shaped, labels, data_sha256(source, shaped))


def data_sha256(source: str | None, examples: Sequence[Example]) -> str:
    """sha256 of a local file's bytes; where there is no file, of the measured rows, sorted."""
    if source is not None and Path(source).expanduser().is_file():
        return sha256_file(Path(source).expanduser())
    return sha256_lines(sorted(sha256_json([e.id, e.prompt, e.completion, e.category]) for e in examples))


def require_not_steering(examples: Sequence[Example], after: str | Path) -> None:
    """Refuse prompts that steered or watched the run whose folder holds `after`; a copy elsewhere is not known.

    An id counts the completion in, so prompts are compared by their texts too, where the run's data is still there.
    """
    run = Path(after).expanduser().resolve().parent
    if not (run / "config.yaml").is_file():
        return
    for place in sorted([*run.glob(RECORD_NAME), *run.glob(f"*/{RECORD_NAME}")]):
        roles = load_record(place.parent).ids
        ids = {*roles["constraint"], *roles["monitor"]}
        texts = _texts_of(run, place.parent.name, ids)
        used = [e for e in examples if e.id in ids or normalise(prompt_text(e)) in texts]
        if used:
            raise DataError(
                f"{len(used)} of {len(examples)} prompts steered or watched the training of {after}, by {place}",
                remedy=f"holdfast certify {run} opens the share that training never saw; or use other prompts",
            )


def _texts_of(run: Path, name: str, ids: set[str]) -> set[str]:
    """Normalised prompts that steered or watched a run; none where neither its screening nor its data can be read."""
    try:
        if (run / FOLDER / RECORD).is_file():  # a run of `safety: auto`
            screening, _ = load_finished(run / FOLDER)
            rows = [example for split in screening.sets.values() for example in (*split.constraint, *split.monitor)]
            rows += [example for figure in FIGURES for example in getattr(screening.monitor, figure)]
        else:
            block = read_yaml(run / "config.yaml").get("safety", {})
            block = block if isinstance(block.get("data"), str) else block.get(name, {})
            options = {key: block[key] for key in ("columns", "split", "subset", "revision") if block.get(key)}
            rows = [example for example in read_examples(block["data"], **options) if example.id in ids]
    except (HoldfastError, KeyError, TypeError, AttributeError):
        logger.warning("the safety data of %s cannot be read: prompts are compared with it by id only", run)
        return set()
    return {normalise(prompt_text(example)) for example in rows}


def require_no_leak(
    examples: Sequence[Example], train_data: Sequence[str], reading: Mapping[str, Any],
    columns: Mapping[str, str] | None = None,
) -> Leakage:  # fmt: skip
    """Look for every prompt in the training data, exactly and nearly, alone and inside longer texts.

    Without `columns` of the training data, those of the prompts are tried where it has none of the known ones.
    """
    if not train_data and columns:
        what = "train_columns are given without train_data"
        raise ConfigError(what, remedy="name the training data, or leave them out")
    if not train_data:
        return Leakage()
    rows = [row for source in train_data for row in _train_rows(source, columns, reading.get("columns"))]
    logger.info("looking for %d prompts in %d rows of %s", len(examples), len(rows), ", ".join(train_data))
    texts = [text for example in rows for text in searchable_texts(example)]
    try:
        require_unseen(examples, texts)
    except DataError as error:
        remedy = "remove these prompts from the safety file: a prompt that was trained on cannot certify"
        raise DataError(error.what.replace("the task data", "the training data"), remedy=remedy) from error
    return Leakage(checked=True, against=", ".join(train_data), prompts=len(examples))


def _train_rows(source: str, columns: Mapping[str, str] | None, of_prompts: Mapping[str, str] | None) -> list[Example]:
    try:
        return read_examples(source, columns=columns)
    except OtherColumnsError as error:
        if of_prompts and not columns:
            return read_examples(source, columns=of_prompts)
        remedy = f"{error.remedy}; of --train-data: --train-columns prompt=NAME --train-columns completion=NAME"
        raise DataError(error.what, remedy=remedy) from error
