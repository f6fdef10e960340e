"""Vaccine: an alignment on safe pairs while the hidden states are perturbed in the worst direction.

Paper: Huang, Hu and Liu, *Vaccine: Perturbation-aware Alignment for Large Language Models against Harmful Fine-tuning
Attack* (NeurIPS 2024), equation (1) and Algorithm 1.
Fine-tuning is plain afterwards. The task data are the safe pairs.

    min_theta  max_{norm(eps) <= rho}  L(theta, eps)

where eps = (eps_1, ..., eps_M) is added to the outputs h_1, ..., h_M of the attention of every block. The inner maximum
is replaced by one normalised step up the gradient of the loss in the hidden states:

    G_m   = dL/dh_m                                    first pass, nothing perturbed
    eps_m = rho G_m / (N + 1e-7),    N = sqrt(sum over m, rows and positions of norm(G_m)^2)
    g     = grad_theta L(theta, eps)                   second pass, eps constant

The step uses g alone. rho is the budget of all rows and positions together, so its effect on one token falls as the
batch grows.

Accumulation: rho is the budget of the whole optimizer step. Each of its K micro-batches is perturbed by its own
gradient to the radius rho / sqrt(K), over all processes together, so that the norm over the whole step is rho as it is
for one batch. The directions are those of one large batch; only the shares of the micro-batches are equal, where one
norm would give more to those of steeper loss. So K micro-batches of b rows are not exactly one of K b.

Departures from the authors' code:
* "attention" is the token mixer of every block, linear attention and state-space modules included; the code lists five
  classes, and its indexing would perturb only the first row of a module that returns a bare tensor;
* padding is not perturbed;
* the first pass runs without dropout and takes gradients of the hidden states only, so that neither the random state
  nor the parameters' gradients know of it; the code clears these gradients, and with them those of earlier
  micro-batches;
* the first pass differentiates the completions' negative log-likelihood, without a router's balancing loss.
The paper uses the authors' rho = 2 with 20 epochs of alignment.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import sum_in_place, world
from holdfast.models.token_mixers import Mixers, shifted, token_mixers
from holdfast.scoring.completion import IGNORE, completion_losses, deterministic
from holdfast.training.hooks import DEFENSES, Defense, Inputs, Items, TrainingRun
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import refuse_where

SMALLEST_NORM = 1e-7


def hidden_gradients(
    run: TrainingRun, mixers: Mixers, batch: Inputs, weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """`weight` times the summed loss of the rows, and its gradient in each mixer's output, zero at padding."""
    leaves: dict[str, Tensor] = {}

    def zero(name: str, hidden: Tensor) -> Tensor:
        if name not in leaves:  # else a checkpointed layer runs again
            if hidden.shape[:2] != batch["input_ids"].shape:
                raise UnsupportedError(
                    f"the output of {name} is {tuple(hidden.shape)}, expected (rows, positions, width)",
                    remedy="vaccine cannot tell rows and padding in it; use another model or defense",
                )
            leaves[name] = hidden.new_zeros(()).expand(hidden.shape).requires_grad_()  # one number of storage
        return leaves[name]

    with deterministic(run.model), shifted(mixers, zero), torch.enable_grad():
        with run.forward.precision():
            loss = completion_losses(run.model, batch, first_k=1).total.sum() * weight
        found = torch.autograd.grad(loss, list(leaves.values()))
    padding = (batch["attention_mask"] == 0).unsqueeze(-1)
    return loss.detach(), {name: g.masked_fill(padding, 0.0) for name, g in zip(leaves, found, strict=True)}


@DEFENSES.register("vaccine")
class Vaccine(Defense):
    name = "vaccine"
    fsdp = True
    stages = ("align",)
    summary = "alignment under the worst small perturbation of the hidden states"
    passes = "2 forward + backward"
    reference = "Huang et al., Vaccine, NeurIPS 2024"
    off = MappingProxyType({"rho": 0.0})
    linear = False
    paper = MappingProxyType({"rho": 2.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        rho: float = option(
            2.0, "norm of the perturbation of all hidden states of one optimizer step together.", least=0
        )

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._sums: list[Tensor] = []

    def validate(self, run: TrainingRun) -> None:
        """Refuse models without token mixers, and runs whose loss the first pass would not see."""
        args, other = run.args, run.other_loss()
        reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        refuse_where([
            (args.packing or args.padding_free,
             "vaccine with packing or padding_free: the rows of a batch are joined, and with them their loss",
             "set packing=False and padding_free=False"),
            (reentrant, "vaccine with reentrant checkpointing: it gives no gradient of hidden states",
             "set gradient_checkpointing_kwargs={'use_reentrant': False}, the default"),
            (other is not None,
             f"vaccine with a loss other than the negative log-likelihood ({other}): the perturbation would be the "
             "worst for another loss than the one trained on", "use loss_type='nll' without label smoothing"),
        ])  # fmt: skip
        token_mixers(run.model)

    def attach(self, run: TrainingRun) -> None:
        self._mixers = token_mixers(run.model)

    @classmethod
    def by_rows(cls, stage: str) -> bool:
        """Its second pass takes the mean over tokens."""
        return False

    def micro_step(self, run: TrainingRun, inputs: Inputs, items: Items) -> Tensor:
        """Gradient of the loss under the perturbation that the unperturbed pass finds."""
        if self.config.rho == 0:
            return run.engine.accumulate(inputs, items, {})
        batch: Inputs = {name: inputs[name].to(run.args.device) for name in ("input_ids", "labels")}
        mask = inputs.get("attention_mask")
        batch["attention_mask"] = torch.ones_like(batch["input_ids"]) if mask is None else mask.to(run.args.device)
        tokens = int((batch["labels"][:, 1:] != IGNORE).sum())
        # The scale matters between processes alone: where each divides by its own tokens, a token weighs differently.
        weight = run.data.token_share(batch, items) / (max(tokens, 1) * world())
        loss, gradients = hidden_gradients(run, self._mixers, batch, weight)
        norms = [  # accumulated in float32 at least
            torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients.values()
        ]
        sums = torch.stack([loss.double(), torch.stack([norm.double().square() for norm in norms]).sum()])
        sum_in_place([sums])
        self._sums.append(sums)
        radius = self.config.rho / run.progress.micro_batches**0.5
        scale = radius / (sums[1].sqrt() + SMALLEST_NORM)
        for gradient in gradients.values():
            gradient.mul_(scale)
        with shifted(self._mixers, lambda name, hidden: gradients[name].to(hidden.dtype)):
            return run.engine.accumulate(inputs, items, {})

    def on_gradient(self, run: TrainingRun) -> None:
        if self._sums:
            loss, square = torch.stack(self._sums).sum(0).tolist()
            self._row = {"unperturbed_loss": loss, "hidden_gradient_norm": square**0.5}
        self._sums = []
