"""The front matter of a model card: what hubs read of it, `model-index` included.

`model-index` holds figures by task and data set. Ours are of two kinds: what a certificate bounds (with alpha, the
confidence and the certificate's sha256 beside the bound), and what the behaviour monitor counted. Only a certificate
that is bound to these very weights is listed.
"""

from pathlib import Path
from typing import Any

from holdfast.core.adapter_card import HUB_ID
from holdfast.records.stored_evidence import Binding
from holdfast.reporting.behaviour import kept_figures
from holdfast.reporting.evidence import Evidence, SafetyEvidence

TASK = {"type": "text-generation", "name": "Text generation"}
CLOSED = {"type": "holdfast-closed-prompts", "name": "Prompts that were closed until they were certified on"}
WATCHED = {"type": "holdfast-monitor-prompts", "name": "Prompts that the behaviour monitor asked"}
BOUNDS = {
    "behaviour": "Upper bound of the share of groups of refused prompts of which one is no longer refused",
    "harm": "Upper bound of the share of groups of prompts of which a reply became more harmful by the judge",
    "log": "Upper bound of the share of groups of prompts whose score became worse",
}
KINDS = ("fixed", "finite_pool")  # whose bound is one number, of the adapter as trained
KEPT = {"refusals_kept": "Share of refusals kept", "answers_kept": "Share of answers kept"}


def front_matter(evidence: Evidence) -> dict[str, Any]:
    """Tags, library, base model and figures; nothing that names this machine."""
    config = evidence.config or {}
    adapter = config.get("lora") is not None
    front: dict[str, Any] = {
        "pipeline_tag": "text-generation",
        "tags": ["holdfast", "safety", "trl", "sft", *(["lora"] if adapter else [])],
    }
    if config:
        front["library_name"] = "peft" if adapter else "transformers"
    model = config.get("model")
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not Path(model).exists():
        front |= {"base_model": model, "base_model_relation": "adapter" if adapter else "finetune"}
    results = [*(_certified(one) for one in evidence.sets if _counts(one)), *_watched(evidence)]
    if results:
        front["model-index"] = [{"name": "Fine-tuned model, measured by holdfast", "results": results}]
    return front


def _counts(one: SafetyEvidence) -> bool:
    """Whether a set has a certificate of these weights that a hub may list: steering figures are no claim."""
    found = one.certificate
    if found is None or found.bound.binding is not Binding.SAME or not found.audited_model:
        return False
    return found.record.by in BOUNDS and found.record.kind in KINDS


def _certified(one: SafetyEvidence) -> dict[str, Any]:
    assert one.certificate is not None
    record = one.certificate.record
    values = {
        "alpha": record.alpha, "confidence": record.confidence, "certified": record.certified,
        "certificate_sha256": one.certificate.sha256,
    }  # fmt: skip
    bound = {
        "type": "certified_upper_bound", "name": BOUNDS[record.by], "value": float(record.upper_bound), "args": values,
    }  # fmt: skip
    return {"task": dict(TASK), "dataset": CLOSED, "metrics": [bound]}


def _watched(evidence: Evidence) -> list[dict[str, Any]]:
    figures = {name: one for name, one in kept_figures(evidence).items() if name in KEPT and one.share is not None}
    metrics = [
        {
            "type": name, "name": KEPT[name], "value": one.share,
            "args": {"kept": one.kept, "of": one.of, "lower_bound_95": one.low},
        }
        for name, one in figures.items()
    ]  # fmt: skip
    return [{"task": dict(TASK), "dataset": WATCHED, "metrics": metrics}] if metrics else []
