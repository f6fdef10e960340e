"""What the model card of a trained model cites: TRL writes the card, from a trainer's `_name` and `_paper`.

The paper has no arXiv id here, so TRL's card cites it in BibTeX and links to no page of it.
"""

from typing import Any

from transformers import Trainer

from holdfast.training.hooks import Defense

PAPER = "Beyond Average Safety"
CITATION = """\
@misc{entesari-beyond-average-safety,
    title        = {{Beyond Average Safety: Chance-Constrained LLM Fine-tuning}},
    author       = {Taha Entesari and Mahyar Fazlyab},
}"""


def citation_of(defense: Defense) -> str:
    """BibTeX of what a defense implements; empty for plain training."""
    if defense.reference.startswith(PAPER):
        return CITATION
    return f"@misc{{{defense.name},\n    note         = {{{defense.reference}}},\n}}" if defense.reference else ""


class CitedTrainer(Trainer):
    """One of TRL's trainers whose card names the defense and cites its paper, then the paper of the task's loss."""

    defense: Defense

    @property
    def method(self) -> str:
        """What TRL calls the task's training: `SFT`, `DPO` or `GRPO`."""
        return getattr(super(), "_name", "")

    @property
    def _name(self) -> str:
        return f"{self.method} with {self.defense.name}" if self.defense.reference else self.method

    @property
    def _paper(self) -> dict[str, Any]:
        """TRL's for plain training; else without its id, or the card would say that DPO's paper has the defense."""
        own: dict[str, Any] = getattr(super(), "_paper", {})
        cited = citation_of(self.defense)
        if not cited:
            return own
        return {"title": self.defense.reference, "citation": "\n\n".join(filter(None, (cited, own.get("citation"))))}
