"""AsFT: fine-tuning that is held to the direction of alignment.

Paper: Yang et al., *AsFT: Anchoring Safety During LLM Fine-Tuning Within Narrow Safety Basin* (2025), the regulariser
on the update outside the alignment direction.

    min_{A,B}  L_task + lambda sum_l |(I - C_l) B_l A_l|_F^2,    C = V V^T / |V|_F,    V = W_aligned - W_unaligned

over the adapted modules l, without LoRA's scaling on B A. With X = B - C B the penalty is trace((X^T X)(A A^T)), two
r x r matrices, and its gradient

    d/dB = 2 lambda (X - C X) (A A^T),    d/dA = 2 lambda (X^T X) A

so that neither B A nor a d_out x d_out matrix is made. It is added once per step, modules of equal shape together.

C is not a projector. Its non-zero eigenvalues are |V|_F / k for k equal singular values; with a merged alignment
adapter they are far below 1, and the penalty is almost lambda |B A|_F^2: decay towards the aligned model, whatever the
direction. `penalty_share` in the log is the ratio of the two (1: the direction does not matter).
`projector="orthogonal"` uses the leading left singular vectors of V instead, which leaves that subspace free.

Departures from the authors' code:
* the penalty enters once per optimizer step, where the code adds it whole to every micro-batch (so that accumulation
  multiplies it);
* modules are matched by name, where the code pairs parameter lists by position; biases take no part;
* V is computed in float32, from the alignment adapter's factors where that is what was given;
* C = 0 where alignment did not change a module; the code divides by zero there;
* `max_grad_norm` of the run applies to the whole gradient; the authors do not clip.
A run that goes on training the alignment adapter is refused: B A would then hold the alignment itself.
The paper merges the alignment adapter first and does not say which V it took; a merged adapter is the likely one, and
what `unaligned` names. Its lambda is 1 (`preset: paper`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.constraint.gradients import ParameterSpace
from holdfast.models.alignment_shift import starting_shift
from holdfast.models.lora_layers import LoraLayer
from holdfast.training.hooks import DEFENSES, Defense, Row, TrainingRun
from holdfast_lab.building_blocks.alignment_projector import Projector, ProjectorOptions, projectors
from holdfast_lab.building_blocks.options import option


@dataclass(frozen=True)
class Group:
    """Modules of equal shape on one device, as one stack: a few kernels instead of a few per module."""

    A: Sequence[nn.Parameter]  # r x d_in each
    B: Sequence[nn.Parameter]  # d_out x r each
    c: Projector  # their maps C

    @torch.no_grad()
    def penalty(self) -> tuple[Tensor, Tensor, Tensor]:
        """(penalty, |B A|_F^2) summed over the modules, and the penalty's gradients with respect to A and B."""
        a, b = torch.stack(list(self.A)), torch.stack(list(self.B))
        x = b - self.c.apply(b)
        gram_a, gram_x = a @ a.mT, x.mT @ x
        values = [(gram * gram_a).sum(dtype=torch.float64) for gram in (gram_x, b.mT @ b)]
        return torch.stack(values), 2 * (gram_x @ a), 2 * ((x - self.c.apply(x)) @ gram_a)


def grouped(layers: Sequence[LoraLayer], found: Mapping[str, Projector]) -> list[Group]:
    """The modules in stacks; factors of C with fewer columns are filled up with zero columns, which change nothing."""
    kinds: dict[Any, list[LoraLayer]] = {}
    for layer in layers:
        key = (layer.A.shape, layer.B.shape, layer.B.device, layer.B.dtype, found[layer.name].square)
        kinds.setdefault(key, []).append(layer)
    groups = []
    for members in kinds.values():
        matrices = [found[layer.name].matrix for layer in members]
        width = max(matrix.shape[1] for matrix in matrices)
        wide = [nn.functional.pad(matrix, (0, width - matrix.shape[1])) for matrix in matrices]
        stack = Projector(torch.stack(wide), found[members[0].name].square)
        groups.append(Group([layer.A for layer in members], [layer.B for layer in members], stack))
    return groups


@DEFENSES.register("asft")
class AsFT(Defense):
    name = "asft"
    packs = True
    summary = "penalty on the update outside the direction of alignment"
    passes = "1 forward + backward"
    needs = frozenset({"unaligned"})
    fresh_lora = True
    reference = "Yang et al., AsFT, 2025"
    off = MappingProxyType({"lam": 0.0})
    paper = MappingProxyType({"lam": 1.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(ProjectorOptions):
        lam: float = option(1.0, "lambda, weight of the penalty.", least=0)

    config: Config

    def validate(self, run: TrainingRun) -> None:
        """A fresh plain LoRA adapter in float32, and a V for each of its modules."""
        self._layers, self._shifts = starting_shift(run.model, run.data.unaligned, defense=self.name)
        ParameterSpace([p for layer in self._layers for p in (layer.A, layer.B)])

    def initialise(self, run: TrainingRun) -> None:
        """Compute every C; V is not kept."""
        found = projectors(self._layers, self._shifts, self.config.projector, self.config.rank)
        self._groups = grouped(self._layers, found)
        del self._shifts, self._layers

    @torch.no_grad()
    def on_gradient(self, run: TrainingRun) -> None:
        values = []
        for group in self._groups:
            both, d_a, d_b = group.penalty()
            values.append(both.to(self._groups[0].c.matrix.device))
            if self.config.lam:  # adding zeros would turn -0.0 into 0.0
                gradient = [*d_a.unbind(0), *d_b.unbind(0)]
                ParameterSpace([*group.A, *group.B]).add_to_gradient([gradient], [self.config.lam])
        self._values = torch.stack(values).sum(0)

    def row(self) -> Row:
        """The penalty without lambda, and its ratio to |B A|_F^2."""
        penalty, plain = self._values.tolist()
        return {"penalty": penalty, "penalty_share": penalty / plain if plain > 0 else None}
