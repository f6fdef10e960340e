"""Issuing a certificate: the verdict from the table, the hashes of what it rests on, and the assumptions in words."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from holdfast.auditing.certificate_spec import CertificateSpec, Leakage, Prompts
from holdfast.auditing.measures import Measure
from holdfast.auditing.pair import Pair
from holdfast.certification.behaviour import assessed
from holdfast.certification.blocks import Assessed, Bound, GivenBound, GivenPlaces, Screened, Sides
from holdfast.certification.openings import Ledger, Opening
from holdfast.certification.terms import Terms, named_statement
from holdfast.constraint.feasibility import NOISE_MARGIN
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import new_folder
from holdfast.core.hashing import sha256_file
from holdfast.core.provenance import commit, hardware, versions
from holdfast.models.content import content_of
from holdfast.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DECISIVE
from holdfast.records.certificate import TABLE_NAME, CertificateRecord
from holdfast.records.certificate_table import Table, write_table
from holdfast.screening.certify_share import CertifyShare

if TYPE_CHECKING:
    from torch import Tensor

_SECOND = re.compile(r"\.lora_(embedding_)?B(\.|$)")
_ADAPTER = re.compile(r"\.after(?=\.|$)")  # the name that a pair gives the adapter of its second model


@dataclass(frozen=True)
class Sources:
    """Where a certificate's parts come from: ledger, prompts and a run's splits.json; and the leak search.

    Of a run that asked its model, `splits` is the record of its screening and `share` the certify prompts.
    """

    ledger: Path
    prompts: str | None
    splits: Path | None
    leakage: Leakage
    share: CertifyShare | None = None

    def book(self, before_sha256: str) -> Ledger:
        """The ledger; of a run that asked its model, public prompts in it count for this model and task."""
        return Ledger(self.ledger) if self.share is None else self.share.ledger(self.ledger, before_sha256)


def issue(
    spec: CertificateSpec, measure: Measure, prompts: Prompts, pair: Pair, table: Table, terms: Terms, entry: Opening,
    sources: Sources, output: Path, notes: Sequence[str] = (),
) -> CertificateRecord:  # fmt: skip
    """Write the adapter of a strength search, then the table, and last the certificate."""
    facts, assessment = measure.facts(pair), assessed(table, terms, spec.claims)
    after, after_sha256 = place_of(spec.after), pair.after.sha256
    if (strength := assessment["strength"]) is not None:
        strength.update({"adapter": None, "original": after, "original_sha256": after_sha256})
        if (chosen := strength["chosen"]) is not None:
            folder = output / f"adapter-strength-{chosen:g}"
            write_strength(pair, chosen, folder)
            after = strength["adapter"] = str(folder.resolve())
            after_sha256 = content_of(folder, trust_remote_code=spec.setup.trust_remote_code).sha256
    replies, splits = facts.pop("replies_sha256", None), sources.splits
    if assessment["behaviour"] is not None:
        how = spec.measured["replies"]
        assessment["behaviour"].update({
            "engine": facts["engine"], "dtype": facts["dtype"],
            "rules": {"name": how["rules"], "revision": how["rules_revision"]},
            "max_new_tokens": how["max_new_tokens"], "longest": how["longest"],
        })  # fmt: skip
    return write_record(
        spec, terms, entry, sources.ledger, table, assessment, output,
        models={"before": str(spec.before), "after": str(spec.after)},
        places={
            "before": place_of(spec.before), "after": after,
            "prompts": None if sources.prompts is None else place_of(sources.prompts),
            "splits": None if splits is None else str(splits.resolve()),
        },
        bound={
            "data_sha256": prompts.data_sha256, "before_sha256": pair.before.sha256, "after_sha256": after_sha256,
            "tokenizer_sha256": pair.tokenizers.tokenizer_sha256, "template_sha256": pair.tokenizers.template_sha256,
            "splits_sha256": None if splits is None else sha256_file(splits), "replies_sha256": replies,
        },
        leakage=sources.leakage, noise=measure.noise,
        screening=None if sources.share is None else sources.share.block(),
        assumptions=[*assumptions(spec, terms, sources, measure.noise), *measure.notes(), *notes],
    )  # fmt: skip


def write_record(
    spec: CertificateSpec, terms: Terms, entry: Opening, ledger: Path, table: Table, assessment: Assessed,
    output: Path, *, models: Sides, places: GivenPlaces, bound: GivenBound, leakage: Leakage,
    assumptions: list[str], noise: float = 0.0, screening: Screened | None = None,
) -> CertificateRecord:  # fmt: skip
    """Write the table and the certificate of what `assessed` found in it."""
    whole: Bound = {
        **bound, "split_sha256": entry.split_sha256, "reference_sha256": bound["before_sha256"],
        "table_sha256": write_table(output / TABLE_NAME, table, terms.tau),
    }  # fmt: skip
    assessment["statement"] = named_statement(
        assessment["statement"], spec.by, models, bound, assessment["behaviour"], screening
    )
    record = CertificateRecord(
        by=spec.by, kind=terms.kind, alpha=terms.alpha, tau=terms.tau, unit=spec.unit, first_k=spec.first_k,
        confidence=terms.confidence, pool=terms.pool, models=models,
        openings={
            "declared": entry.declared, "this": entry.number, "ledger": str(ledger.resolve()), "claim": entry.claim,
        },
        bound=whole, places={**places, "table": TABLE_NAME}, leakage=leakage.to_json(), settings=spec.settings,
        noise_floor=noise, assumptions=assumptions, versions=versions(), commit=commit(), hardware=hardware(),
        made=datetime.now(UTC).isoformat(timespec="seconds"), screening=screening, **assessment,
    )  # fmt: skip
    record.save(output)
    return record


def write_strength(pair: Pair, strength: float, folder: Path) -> None:
    """Write `after` at a strength s as an ordinary adapter: B scaled by s as measured, everything else as it was."""
    source = pair.after.adapter
    assert source is not None, "set_strength refuses anything but an adapter"
    pair.set_strength(strength)
    with pair.on("after") as model:
        scaled = {_ADAPTER.sub("", name): p for name, p in model.named_parameters() if _SECOND.search(name)}
        tensors: dict[str, Any] = load_file(source / ADAPTER_WEIGHTS)
        if (factors := {name for name in tensors if _SECOND.search(name)}) != set(scaled):
            raise CheckpointError(
                f"{source / ADAPTER_WEIGHTS}: {len(factors)} B factors in the file, {len(scaled)} in the model: they "
                "do not correspond",
                remedy="save the adapter again with PEFT's save_pretrained",
            )
        tensors |= {name: tensor.detach().cpu().contiguous() for name, tensor in scaled.items()}
    there = folder.exists()
    with tempfile.TemporaryDirectory() if there else new_folder(folder) as made:
        _save(source, tensors, Path(made))
        if there and content_of(folder).sha256 != content_of(made).sha256:
            raise ConfigError(f"{folder} exists and holds something else", remedy="name another folder with --output")


def _save(source: Path, tensors: dict[str, Tensor], folder: Path) -> None:
    """The tensors, with every other file of the adapter that counts."""
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    decisive = {path for pattern in DECISIVE for path in source.glob(pattern) if path.is_file()}
    for path in sorted({source / ADAPTER_CONFIG, *decisive}):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def place_of(ref: str | Path) -> str:
    """A reference that still leads there from another working folder."""
    path = Path(ref).expanduser()
    return str(path.resolve()) if path.exists() else str(ref)


def _regression_words(spec: CertificateSpec) -> list[str]:
    """What a regression was, and what was not looked at."""
    greedy = (
        "Replies are the most likely tokens one after another; other ways of decoding, longer replies, and what "
        "rounding on other hardware does to them were not tested."
    )
    if spec.by == "behaviour":
        return [
            "A prompt is lost when the model before refused it by the rules and the model after does not. A reply "
            "that the rules cannot sort is no refusal. Whether a reply is harmful was not judged.",
            greedy,
        ]
    if spec.by == "harm":
        judge = spec.measured["judge"]
        return [
            f"A regression is a reply to which the judge {judge['name']} (revision {judge['revision']}) gives a "
            "probability of harm more than tau above that of the model before's reply to the same prompt (on_policy), "
            "or a pair of replies that it did not score. Where it gives no probabilities: a reply that is not called "
            "safe, to a prompt whose reply before was not called unsafe. The judge's own errors are not in the bound.",
            greedy,
        ]
    change = f"likelihood of the given completion that fell by more than tau ({spec.unit})"
    change = f"divergence from the model before above tau ({spec.unit})" if spec.by == "kl" else change
    return [f"A regression is a {change}; what the model writes on its own was not judged."]


def drawn_words(terms: Terms) -> str:
    """How the prompts were drawn, which no file can prove."""
    return {
        "finite_pool": f"The prompts are a random sample without replacement from a list of {terms.pool}.",
        "sequential": "The prompts arrived in an order that does not depend on how the models answer.",
        "rows": "The prompts were drawn one by one, independently; near-duplicates among them are chance.",
        "groups": "The groups of near-duplicate prompts are independent draws from the source that the statement "
        "speaks of; a group regresses when any of its prompts does.",
    }[terms.kind if terms.kind in ("finite_pool", "sequential") else terms.drawn]


def assumptions(spec: CertificateSpec, terms: Terms, sources: Sources, noise: float) -> list[str]:
    """What the statement rests on and no file can prove, in plain words."""
    sentences = [
        drawn_words(terms),
        "Models, tau, alpha and unit were fixed before these prompts were looked at, and the prompts played no part in "
        "training or in any choice; looks that were not entered in the ledger are not known here.",
        *_regression_words(spec),
        "The hashes bind this file to data, models and table. They are not a signature: compare the sha256 with the "
        "one that was printed when it was issued, or sign it.",
    ]
    if sources.share is not None:
        sentences.append(
            "Prompts that ship with holdfast are public: that nobody trained on them, or on their like, elsewhere is "
            "assumed. Their openings are counted for this model before and this task."
        )
    if not sources.leakage.checked:
        sentences.append("No training data was given: that no prompt was trained on is assumed, not checked.")
    if terms.openings > 1:
        sentences.append(
            f"{terms.openings} openings were declared; each spends 1/{terms.openings} of the allowed error, and no "
            "model was built from what an earlier opening showed."
        )
    if noise * NOISE_MARGIN > spec.constraint.tau:
        sentences.append(f"tau lies within {NOISE_MARGIN:g} times the numerical noise, which was explicitly allowed.")
    return sentences
