"""The certify prompts of a run that asked its model: whole bundled kinds, and dropped groups of the task; no replies.

A certificate opens those of the sets that keep refusals, and on request those of the sets that keep answers. Bundled
prompts are public; their openings are counted for the model before and the task together (`certification/openings.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.certification.blocks import Screened
from holdfast.certification.openings import Ledger, ScopedLedger, scope_of
from holdfast.core.files import write_text
from holdfast.data.bundled import public_ids
from holdfast.data.examples import Example
from holdfast.screening.screen import Screening
from holdfast.screening.sets import CLASS_OF
from holdfast.screening.settings import Keep

PROMPTS = "prompts.jsonl"
OWNER = 0o600


@dataclass(frozen=True)
class CertifyShare:
    """What a certificate of the run opens."""

    sets: tuple[str, ...]  # names of the sets that the prompts are of
    examples: tuple[Example, ...]  # each prompt once, without a reply
    keep: Mapping[str, str]  # by id, the class that the prompt's set keeps
    public: frozenset[str]  # ids of the prompts that ship with holdfast
    task_sha256: str  # of the task's rows, whatever their order (`content_sha256`): a part of the ledger's scope
    screening: Screening  # what was found before training

    def ledger(self, path: Path, before_sha256: str) -> Ledger:
        """The ledger in a file, in which the public prompts count for this model and task."""
        return ScopedLedger(path, scope_of(before_sha256, self.task_sha256), self.public)

    def block(self) -> Screened:
        """What a certificate says of it; no text."""
        found = self.screening
        return {
            "rows": found.rows, "asked_rows": found.asked_rows, "conflicts": len(found.conflicts),
            "dropped": len(found.dropped), "rule": found.rule, "sets": list(self.sets), "public": len(self.public),
            "prompts": len(self.examples), "task_sha256": self.task_sha256,
        }  # fmt: skip

    def write(self, path: Path) -> Path:
        """The prompts as a file that a certificate can name, for its owner alone."""
        rows = [{"prompt": example.prompt, "category": example.category} for example in self.examples]
        write_text(path, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), mode=OWNER)
        return path


def certify_share(screening: Screening, keeps: Mapping[str, Keep], task_sha256: str) -> CertifyShare:
    """The certify prompts of the sets in `keeps`, each with what it keeps; `task_sha256` is a `content_sha256`."""
    found: dict[str, tuple[Example, str]] = {}
    for name, kept in keeps.items():
        for example in screening.sets[name].certify:
            found.setdefault(example.id, (example, str(CLASS_OF[kept])))
    examples = tuple(found[key][0] for key in sorted(found))
    keep = {key: kept for key, (_, kept) in found.items()}
    return CertifyShare(tuple(keeps), examples, keep, public_ids(examples), task_sha256, screening)
