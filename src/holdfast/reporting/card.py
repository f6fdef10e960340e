"""The model card `README.md` (claim, figures, limits; no text of any example), and a run with it on the hub.

Hubs read its front matter. `model-index` holds what a certificate of these very weights bounds, with its alpha,
confidence and sha256, and what the behaviour monitor counted.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from holdfast.core import adapter_card
from holdfast.core.adapter_card import CARD_MARKER, HUB_ID
from holdfast.core.errors import ConfigError, ResourceError
from holdfast.core.files import write_text
from holdfast.records.stored_evidence import Binding
from holdfast.reporting.behaviour import behaviour_view, kept_figures
from holdfast.reporting.evidence import Evidence, SafetyEvidence
from holdfast.reporting.facts import facts, screening_lines
from holdfast.reporting.read import read_evidence
from holdfast.reporting.verdict import claim, headline, verdict
from holdfast.reporting.views import figure_rows
from holdfast.reporting.wording import markdown

MARKER = CARD_MARKER
CLAIM_LENGTH = 2000
"""The whole sentence of a certificate: what it leaves out at its end is what limits it."""
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCED = re.compile(r"^```.*?^```\s*$", re.DOTALL | re.MULTILINE)
# Every line that PEFT's and TRL's unedited cards hold besides headings: anything else is somebody's own text.
_GENERATED = re.compile(
    r"#.*|.*\[More Information Needed\]|\*\*(BibTeX|APA):\*\*|- [\w ]+:? [\w.+-]+"
    r"|Users \(both direct and downstream\) should be made aware .*|Use the code below to get started with the model\."
    r"|Carbon emissions can be estimated using the \[Machine Learning Impact calculator\].*"
    r"|This model is a fine-tuned version of \[.*\]\(.*\)( on the \[.*\]\(.*\) dataset)?\."
    r"|It has been trained using \[TRL\]\(https://github\.com/huggingface/trl\)\."
    r"|This model was trained with [\w -]+(, a method introduced in \[.*\]\(.*\))?\.|Cite [\w -]+ as:|\[<img src=.*"
)
_SIGNS = ("# Model Card for Model ID", "It has been trained using [TRL]")


@dataclass(frozen=True)
class Card:
    """Where a card belongs, and whether it was written; one with a user's own text is kept."""

    path: Path
    written: bool


def write_cards(evidence: Evidence) -> list[Card]:
    """Write README.md into a finished run's folder and beside its weights; a link is not followed."""
    if not evidence.trained or evidence.unfinished:
        return []
    text = card_text(evidence)
    cards = []
    for folder in (evidence.folder, evidence.folder / "adapter", evidence.folder / "model"):
        if folder.is_dir():
            path = folder / "README.md"
            linked = folder.is_symlink() and folder != evidence.folder  # it may lead anywhere
            written = not linked and is_ours_to_write(path)
            if written:
                write_text(path, text)
            cards.append(Card(path, written))
    return cards


def is_ours_to_write(path: Path) -> bool:
    """Whether no text of a user's own would be lost: the file is absent, ours, or as PEFT or TRL generated it."""
    if path.is_symlink():
        return False
    if not path.exists():
        return True
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    if MARKER in text:
        return True
    if not any(sign in text for sign in _SIGNS):
        return False
    body = _FENCED.sub("", _COMMENT.sub("", _FRONT.sub("", text, count=1)))
    return all(_GENERATED.fullmatch(line.strip()) for line in body.splitlines() if line.strip())


def card_text(evidence: Evidence) -> str:
    """The card: YAML front matter, then Markdown in which every stored value is escaped."""
    front = yaml.safe_dump(front_matter(evidence), sort_keys=True).strip()
    found = verdict(evidence)
    parts = [
        f"---\n{front}\n---\n{MARKER}",
        f"# {adapter_card.MODEL_NAME}",
        markdown(headline(evidence)),
        f"**{markdown(found.title)}.** {markdown(found.reason, CLAIM_LENGTH)}",
        markdown(claim(evidence), CLAIM_LENGTH),
        *_listed("Behaviour", [*view.lines, view.way_back] if (view := behaviour_view(evidence)) else []),
        *_listed("Screening before training", screening_lines(evidence)),
        *(_figures(evidence, one) for one in evidence.sets if one.figures or one.certificate),
        "## How it was made",
        "\n".join(f"- {markdown(name)}: {markdown(_public(value))}" for name, value in facts(evidence))
        or "Not recorded.",
        *([note] if (note := adapter_card.loading_note(evidence.folder / "adapter")) else []),
        "## What this does not say",
        _LIMITS,
        "The whole report is in report.html of the run folder.",
    ]
    return "\n\n".join(parts) + "\n"


_LIMITS = """\
- The constraint acts on a minibatch and to first order: it steers, it does not promise the limit at every step. With a
  defense other than holdfast and primal_dual the limit did not even steer: the figures are a measurement and no more.
- Constraint and monitor examples were seen during training. Without a certificate, nothing follows for other prompts.
- A likely safe reply is not a harmless model: judge real replies too.
- A certificate speaks of prompts like the certified ones, drawn independently, and of one opening of that split.
- Certificates are bound by hashes, and signed where somebody did: check one with `holdfast verify`."""


def _public(value: str) -> str:
    """A value without the folders of this machine: a card is made to be published."""
    return ", ".join(Path(part).name if Path(part).is_absolute() else part for part in value.split(", "))


def _listed(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {markdown(words)}" for words in lines if words)] if lines else []


def _figures(evidence: Evidence, one: SafetyEvidence) -> str:
    assert one.limit is not None
    title = f"## Figures, {markdown(one.name)}" if evidence.named else "## Figures"
    lines = [title, "", "| examples | degraded | share | upper bound (95 %) | verdict |", "|---|---|---|---|---|"]
    for row in figure_rows(one):
        cells = (f"{row.who}, {row.what}", row.count, row.rate, row.upper, row.fits)
        lines.append(f"| {' | '.join(markdown(cell) for cell in cells)} |")
    return "\n".join(lines)


CLOSED = {"type": "holdfast-closed-prompts", "name": "Prompts that were closed until they were certified on"}
BOUNDS = {
    "behaviour": "Upper bound of the share of groups of refused prompts of which one is no longer refused",
    "harm": "Upper bound of the share of groups of prompts of which a reply became more harmful by the judge",
    "log": "Upper bound of the share of groups of prompts whose score became worse",
}
KINDS = ("fixed", "finite_pool")  # whose bound is one number, of the adapter as trained


def front_matter(evidence: Evidence) -> dict[str, Any]:
    """Tags, library, base model and figures; nothing that names this machine."""
    config = evidence.config or {}
    adapter = config.get("lora") is not None
    tags = ["holdfast", "safety", "trl", "sft", *(["lora"] if adapter else [])]
    front: dict[str, Any] = {"pipeline_tag": "text-generation", "tags": tags}
    if config:
        front["library_name"] = "peft" if adapter else "transformers"
    model = config.get("model")
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not Path(model).exists():
        front |= {"base_model": model, "base_model_relation": "adapter" if adapter else "finetune"}
    results = [*_certified(evidence), *adapter_card.kept_results(kept_figures(evidence))]
    if results:
        front["model-index"] = adapter_card.model_index(results)
    return front


def _certified(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """What certificates of these very weights bound, where a hub may list it: steering figures are no claim."""
    for found in (one.certificate for one in evidence.sets if one.certificate is not None):
        record, checked = found.record, found.bound.binding is Binding.SAME and found.audited_model
        if checked and record.by in BOUNDS and record.kind in KINDS:
            about = {name: getattr(record, name) for name in ("alpha", "confidence", "certified")}
            bound = {
                "type": "certified_upper_bound", "name": BOUNDS[record.by], "value": float(record.upper_bound),
                "args": {**about, "certificate_sha256": found.sha256},
            }  # fmt: skip
            yield {"task": dict(adapter_card.TASK), "dataset": CLOSED, "metrics": [bound]}


CARD, ADAPTER_CONFIG, BASE = "README.md", "adapter_config.json", "base_model_name_or_path"


def push_to_hub(run: str | Path, repository: str, *, private: bool = False) -> str:
    """Upload what a run trained in one commit, with the card that `report` or the user wrote; returns the address.

    Raises:
        ConfigError: the folder has no finished run with weights, or the repository's name is not `owner/name`.
        ResourceError: the hub refused, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if not HUB_ID.fullmatch(repository):
        raise ConfigError(f"{repository!r} is no repository of a hub", remedy="write it as OWNER/NAME")
    evidence = read_evidence(Path(run))
    folder = evidence.folder / ("adapter" if (evidence.folder / "adapter").is_dir() else "model")
    names = adapter_card.ADAPTER_FILES if folder.name == "adapter" else adapter_card.MODEL_FILES
    found = [path for path in sorted(folder.glob("*")) if any(fnmatch(path.name, name) for name in names)]
    files = [path for path in found if path.is_file() and not path.is_symlink()]  # a link may lead anywhere
    weights = any(path.suffix == ".safetensors" for path in files) and not folder.is_symlink()
    if not weights or not evidence.trained or evidence.unfinished:
        what = f"{run} has no trained model to push"
        raise ConfigError(what, remedy="name the output_dir of a finished `holdfast train` run")
    own = folder / CARD
    kept = own.is_file() and not own.is_symlink() and not is_ours_to_write(own)
    card = own.read_bytes() if kept else card_text(evidence).encode("utf-8")
    added = [CommitOperationAdd(path.name, _content(path)) for path in files] + [CommitOperationAdd(CARD, card)]
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private or None, exist_ok=True)  # None: as the owner has set it
        public = private and not api.repo_info(repository).private
        if not public:
            api.create_commit(repository, added, commit_message="A model fine-tuned with holdfast")
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
        remedy = "check the network and HF_TOKEN (or `hf auth login`), which needs the right to write there"
        raise ResourceError(f"{repository} was not pushed: {cause}", remedy=remedy) from error
    if public:
        what = f"{repository} exists already and is public: nothing was pushed"
        raise ConfigError(what, remedy="name another repository, make this one private, or leave --private out")
    return str(address)


def _content(path: Path) -> Path | bytes:
    """A file as it is sent: an adapter's base that is a folder by its name alone, since a path tells of the machine."""
    if path.name != ADAPTER_CONFIG:
        return path
    settings = json.loads(path.read_text(encoding="utf-8"))
    base = settings.get(BASE)
    if not isinstance(base, str) or HUB_ID.fullmatch(base):
        return path
    return json.dumps(settings | {BASE: Path(base).name}, indent=2).encode("utf-8")
