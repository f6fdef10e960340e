"""SafeLoRA: after training, updates that point away from alignment are mapped onto it.

Paper: Hsu et al., *Safe LoRA: the Silver Lining of Reducing Safety Risks when Fine-tuning Large Language Models*
(NeurIPS 2024), its projection of LoRA weights.
Training is plain SFT.

For each adapted module, with V = W_aligned - W_unaligned and C = V V^T / |V|_F:

    cos = <C B A, B A> / (|C B A|_F |B A|_F)
    B <- C B   if cos <= threshold              (mode threshold)
               if cos is among the N smallest   (mode number)

A is left alone. cos comes from r x r matrices: <C B A, B A> = trace((B^T C B)(A A^T)), and alike the two norms. C is
positive semidefinite, so cos >= 0 and a negative threshold changes nothing. cos is rounded to 5 decimals, as in the
authors' code, so that their thresholds decide alike.

C is not a projector but shrinks: k equal singular values of V scale what survives by |V|_F / k. With a merged alignment
adapter of rank 32, an update that knows nothing of V has cos near sqrt(32 / d_out), is mapped at any usual threshold,
and keeps a few percent of its norm: close to undoing the fine-tuning. `safelora.json` in the run's folder says how many
modules were mapped and what was kept; checkpoints, and what is measured during training, are of the adapter before
that. `projector="orthogonal"` uses the leading left singular vectors of V instead; applying that twice changes nothing
more, where `paper` shrinks again.

Departures from the authors' code:
* modules are matched by name and A and B told apart by name, where the code goes by position and by which dimension
  equals r (wrong for a module with d_out = r); biases take no part;
* V is computed in float32, from the alignment adapter's factors where that is what was given; the code subtracts in the
  model's dtype, whose rounding can exceed V;
* mode number maps exactly N modules, ties by name, where the code also takes everything equal to the N-th;
* where alignment did not change a module C = 0 and cos = 0, so that its update goes; the code divides by zero.
The authors' configuration has mode number, N = 10; the paper uses the threshold 0.5 (`preset: paper`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from holdfast.core.errors import NumericalError
from holdfast.core.files import write_json
from holdfast.core.library_types import LanguageModel
from holdfast.core.ranks import rank
from holdfast.models.alignment_shift import Shift, starting_shift
from holdfast.models.lora_layers import LoraLayer, lora_layers
from holdfast.training.hooks import DEFENSES, Defense, TrainingRun
from holdfast_lab.building_blocks.alignment_projector import Projector, ProjectorOptions, projectors
from holdfast_lab.building_blocks.options import option

logger = logging.getLogger(__name__)

DECIMALS = 5


@dataclass(frozen=True)
class ModuleReport:
    """One module: its cosine (rounded), whether B became C B, and |dW after| / |dW before|."""

    name: str
    cosine: float
    projected: bool
    kept_norm: float


@dataclass(frozen=True)
class Report:
    """What was done to an adapter."""

    modules: int  # how many were looked at
    projected: int  # how many of them were changed
    mean_cosine: float  # over all modules
    kept_norm: float  # |dW after|_F / |dW before|_F over all modules together, dW = s B A; 1 where nothing was learnt
    each: tuple[ModuleReport, ...]  # module by module, by name


@dataclass(frozen=True)
class _Measured:
    layer: LoraLayer
    mapped: Tensor  # C B
    cosine: float
    before: float  # |s B A|_F^2
    after: float  # |s C B A|_F^2


@torch.no_grad()
def _measure(layer: LoraLayer, c: Projector) -> _Measured:
    b, a = layer.B.detach(), layer.A.detach().double()
    work = torch.promote_types(b.dtype, torch.float32)
    mapped = Projector(c.matrix.to(b.device, work), c.square).apply(b.to(work))
    gram_a, old, new = a @ a.mT, b.double(), mapped.double()
    inner, before, after = (
        float(((left.mT @ right) * gram_a).sum()) for left, right in ((old, new), (old, old), (new, new))
    )
    if not max(before, after) < float("inf"):
        what = f"safelora: the trained update of {layer.name} is not finite"
        raise NumericalError(what, remedy="lower the learning rate")
    size = max(before, 0.0) ** 0.5 * max(after, 0.0) ** 0.5
    cosine = round(min(1.0, max(0.0, inner / size)), DECIMALS) if size > 0 else 0.0
    return _Measured(layer, mapped, cosine, before * layer.scaling**2, after * layer.scaling**2)


@torch.no_grad()
def map_onto_alignment(layers: Sequence[LoraLayer], found: Mapping[str, Projector], config: SafeLoRA.Config) -> Report:
    """Choose modules and replace their B by C B, in place."""
    measured = [_measure(layer, found[layer.name]) for layer in layers]
    lowest = sorted(measured, key=lambda m: (m.cosine, m.layer.name))[: config.number]
    chosen = lowest if config.mode == "number" else [m for m in measured if m.cosine <= config.threshold]
    names = {m.layer.name for m in chosen}
    for m in chosen:
        m.layer.B.copy_(m.mapped)
    after = [m.after if m.layer.name in names else m.before for m in measured]
    each = (
        ModuleReport(m.layer.name, m.cosine, m.layer.name in names, _ratio(now, m.before))
        for m, now in zip(measured, after, strict=True)
    )
    kept = _ratio(sum(after), sum(m.before for m in measured))
    return Report(len(measured), len(chosen), sum(m.cosine for m in measured) / len(measured), kept, tuple(each))


def _ratio(after: float, before: float) -> float:
    return float((after / before) ** 0.5) if before > 0 else 1.0


def safe_lora(model: LanguageModel, shift: Mapping[str, Shift], config: SafeLoRA.Config | None = None) -> Report:
    """Apply SafeLoRA to any PEFT model with one plain LoRA adapter, in place; no training and no data.

    Args:
        model: the aligned model with the fine-tuned adapter, not merged.
        shift: V of every adapted module.

    Example:
        model = PeftModel.from_pretrained(aligned, "task-adapter")
        shift = alignment_shift(lora_layers(model, defense="safelora"), "alignment-adapter")
        report = safe_lora(model, shift, SafeLoRA.Config(mode="threshold", threshold=0.5))
        model.save_pretrained("task-adapter-mapped")
    """
    config = SafeLoRA.Config() if config is None else config
    layers = lora_layers(model, defense="safelora")
    return map_onto_alignment(layers, projectors(layers, shift, config.projector, config.rank), config)


@DEFENSES.register("safelora")
class SafeLoRA(Defense):
    name = "safelora"
    packs = True
    stages = ("posthoc",)
    summary = "after training, maps updates that point away from alignment onto it"
    passes = "1 forward + backward"
    needs = frozenset({"unaligned"})
    fresh_lora = True
    reference = "Hsu et al., Safe LoRA, NeurIPS 2024"
    off = MappingProxyType({"mode": "threshold", "threshold": -1.0})
    paper = MappingProxyType({"mode": "threshold", "threshold": 0.5})

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorOptions):
        mode: Literal["threshold", "number"] = option(
            "number", "`number` (the modules with the smallest cosine) or `threshold` (all at or below it).",
            choices=("threshold", "number"),
        )  # fmt: skip
        threshold: float = option(0.5, "of the cosine; mode threshold.", least=-1, most=1)
        number: int = option(10, "how many modules, all where there are fewer; mode number.", least=1)

    config: Config
    report: Report | None = None

    def validate(self, run: TrainingRun) -> None:
        """A fresh plain LoRA adapter, and a V for each of its modules."""
        self._layers, self._shifts = starting_shift(run.model, run.data.unaligned, defense=self.name)

    def initialise(self, run: TrainingRun) -> None:
        """Compute every C now, so that nothing can fail after hours of training; they wait on the CPU."""
        found = projectors(self._layers, self._shifts, self.config.projector, self.config.rank)
        self._projectors = {name: Projector(c.matrix.cpu(), c.square) for name, c in found.items()}
        del self._shifts

    def transform(self, run: TrainingRun) -> None:
        self.report = map_onto_alignment(self._layers, self._projectors, self.config)
        logger.info(
            "safelora: %d of %d modules mapped, mean cosine %.3f, %.3f of the update's norm kept",
            self.report.projected, self.report.modules, self.report.mean_cosine, self.report.kept_norm,
        )  # fmt: skip
        if rank() == 0:
            write_json(run.folder / "safelora.json", asdict(self.report))
