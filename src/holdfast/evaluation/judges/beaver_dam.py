"""The judge of the harmful fine-tuning literature: the 14-category classifier beaver-dam-7b."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import UnsupportedError
from holdfast.evaluation.judge import JUDGES
from holdfast.evaluation.judges.classifier import (
    BATCH_SIZE,
    THRESHOLD,
    ClassifierJudge,
    DType,
    Opened,
    device_of,
    require_positions,
)

MODEL = "PKU-Alignment/beaver-dam-7b"
MAX_LENGTH = 512


@JUDGES.register("beaver_dam")
class BeaverDamJudge(ClassifierJudge):
    """beaver-dam-7b: 14 harm categories by a Llama-7B classifier, unsafe above 0.4 (non-commercial weights).

    Texts longer than 512 tokens lose their tail and with it the end token, as in the original; `truncated` counts them.
    On a GPU the weights are bfloat16 unless `dtype` says float32; head and sigmoid are always fp32.

    Args:
        model: hub id or folder of the classifier, weights in safetensors.
        hub_revision: commit, tag or branch of a hub id.
    """

    name = "beaver_dam"
    keeps_end = False

    def __init__(
        self,
        *,
        model: str | Path = MODEL,
        hub_revision: str | None = None,
        threshold: float = THRESHOLD,
        max_length: int = MAX_LENGTH,
        batch_size: int = BATCH_SIZE,
        dtype: DType = "auto",
        device: str | None = None,
    ) -> None:
        super().__init__(threshold=threshold, max_length=max_length, batch_size=batch_size, dtype=dtype, device=device)
        self.model, self.hub_revision = model, hub_revision

    def _open(self) -> Opened:
        from holdfast.data.catalogue import CATEGORIES
        from holdfast.models.classifier import labels_of, load_classifier
        from holdfast.models.handle import check_vocabulary, load_tokenizer

        device = device_of(self.device)
        small = self.dtype == "bfloat16" or (self.dtype == "auto" and device.startswith("cuda"))
        tokenizer = load_tokenizer(self.model, revision=self.hub_revision)
        model = load_classifier(
            self.model, revision=self.hub_revision, dtype="bfloat16" if small else "float32", device=device
        )
        labels = labels_of(model)
        if labels != tuple(CATEGORIES):
            raise UnsupportedError(
                f"judge {self.name}: {self.model} has {len(labels)} labels in another order than beaver-dam-7b "
                f"({_first_difference(labels, tuple(CATEGORIES))})",
                remedy="name a classifier whose config.json lists the 14 categories in beaver-dam's order",
            )
        check_vocabulary(model, tokenizer)
        require_positions(f"judge {self.name}", model, self.max_length)
        return Opened(model, tokenizer, labels)

    def _hashed(self) -> str:
        from holdfast.models.content import content_of

        return content_of(self.model, revision=self.hub_revision).sha256


def _first_difference(found: tuple[str, ...], expected: tuple[str, ...]) -> str:
    for place, name in enumerate(expected):
        other = found[place] if place < len(found) else None
        if other != name:
            return f"label {place}: expected {name!r}, found {other!r}"
    return f"expected {len(expected)} labels"
