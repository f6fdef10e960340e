"""SaLoRA: LoRA whose change of the output never enters the directions of the safe replies.

Paper: Li et al., *SaLoRA: Safety-Alignment Preserved Low-Rank Adaptation* (ICLR 2025), and the authors' code.
Before training: one forward sweep over 128 safety pairs and one over 128 task rows, both again for every further 4 GiB
of sums (Llama-3.1-8B, q, k, v: twice each).

For every adapted module W, with F = X W^T over its inputs X at the reply tokens:

    V_s, V_t = top r_s, r_t right singular vectors of F on safety pairs, on task rows
    C        = I - V_s V_s^T,    W ~ U S Z^T of LoRA's rank r
    A_0      = S^(1/2) Z^T,      B_0 = V_t V_t^T U S^(1/2)
    y        = (W - s C B_0 A_0) x + s C B A x        A, B trained from A_0, B_0;  W and C fixed

At the start this is the given model; afterwards V_s^T (y - W x) = 0 for every x, to the rounding of the forward: the
outputs change only outside the safety directions.

What is trained is one ordinary adapter of rank 2 r on the given W, B' = [P, -P_0] and A' = [A; A_0] with P = C B. Its
second halves stay fixed, the gradient of P is projected before clipping, and P after the step:

    grad_P <- C grad_P,    P <- C optimizer(P)

which is the same training: dL/dB = C dL/dP, so B sees this very gradient; and a step -u with decay d takes C B to
C (d B - u) = C (d P - u), for every optimizer that works element by element (SGD, Adam, AdamW, Lion). Those that look
at a whole matrix (Adafactor, GaLore, Apollo, StableAdamW) are refused.

Departures from the authors' code:
* the base is not touched: its weights in bfloat16 lose nothing, an adapter saved at any time fits the original model
  (theirs is useless without the changed base), and with the adapter off the model is theta_0;
* the two halves cancel inside one product, so the start is the given model to rounding in bfloat16 too, and under LoRA
  dropout, whose mask they share (the authors use none);
* F^T F is summed instead of keeping F; decompositions are exact up to 2048 rows, above by subspace iteration;
* directions that F does not have are left out, where the authors' decomposition fills up with noise: with few distinct
  reply tokens the first layer has fewer than r_s;
* the task rows are drawn from the run's own.
r and lora_alpha are those of the run's adapter; the authors use r = 16, lora_alpha = 16 (s = 1) on q_proj and v_proj,
dropout 0, learning rate 1e-4, weight decay 0. Decay pulls A and B to zero, not back to A_0 and B_0: it takes that part
out of the given model, here as in the authors' code. The saved adapter has rank 2 r, and so has AdamW's state.

The paper *Beyond Average Safety* describes another method under this name, `salora_gradproj`; so there is no preset.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn

from holdfast.core.errors import ConfigError
from holdfast.core.library_types import LanguageModel
from holdfast.core.ranks import gather_objects, rank, world
from holdfast.core.seeding import generator
from holdfast.data.encode import IGNORE, Encoded
from holdfast.models.fingerprint import has_idle_adapter
from holdfast.models.lora_layers import LoraLayer, lora_layers
from holdfast.scoring.completion import deterministic, hidden_states
from holdfast.training.hooks import DEFENSES, Defense, TrainingRun
from holdfast.training.support import optimizer_name, require_float32
from holdfast_lab.building_blocks.activation_subspace import SecondMoments, groups, truncated_svd
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import refuse_where

logger = logging.getLogger(__name__)

# Their step at one entry depends on the other entries of the matrix, so that C B and B do not take the same one.
MATRIX_OPTIMIZERS = ("adafactor", "galore", "apollo", "stable_adamw")


def outside(directions: Tensor, columns: Tensor) -> Tensor:
    """C z = z - V (V^T z), for orthonormal columns V."""
    return columns - directions @ (directions.T @ columns)


def task_rows(run: TrainingRun, count: int) -> list[Encoded]:
    """A seeded draw of the task rows as TRL tokenised them; scored are the tokens that training scores."""

    def encoded(i: int) -> Encoded:
        row = run.data.task[i]
        ids = tuple(row["input_ids"])
        return Encoded(id=f"task {i}", input_ids=ids, labels=tuple(row.get("labels") or ids), truncated=False)

    return [encoded(i) for i in _drawn(run, len(run.data.task), count, "task")]


def _drawn(run: TrainingRun, size: int, count: int, name: str) -> list[int]:
    order: list[int] = generator(run.args.stream_seed, "salora", name).permutation(size).tolist()
    return order[:count]


@torch.no_grad()
def reply_moments(run: TrainingRun, layers: Sequence[LoraLayer], rows: Sequence[Encoded]) -> SecondMoments:
    """Second moments of the layers over the reply tokens of the rows, dropout off, batches shared among ranks."""
    forward, moments = run.forward, SecondMoments(layers)
    with deterministic(run.model), forward.precision():
        for positions in forward.batches(rows)[rank() :: world()]:
            batch = forward.batch([rows[i] for i in positions])
            with moments.counting(batch["labels"] != IGNORE):
                hidden_states(run.model, batch)
    moments.reduce()
    return moments


def double_rank(
    model: LanguageModel, layers: Sequence[LoraLayer], factors: Mapping[str, tuple[Tensor, Tensor]]
) -> None:
    """Exchange every layer's A and B for `factors` of twice the rank; PEFT's settings follow.

    The parameters are new objects: an optimizer made before does not hold them. What PEFT saves afterwards is an
    ordinary adapter. With rsLoRA, s = lora_alpha / sqrt(r), lora_alpha grows by sqrt(2) and is no integer any more.
    """
    adapter = layers[0].adapter
    # A copy: the settings may be the very object that the caller will make other adapters from.
    config = copy.copy(model.peft_config[adapter])
    stretch = math.sqrt(2) if config.use_rslora else 2
    config.r *= 2
    config.rank_pattern = {key: value * 2 for key, value in (config.rank_pattern or {}).items()}
    config.lora_alpha *= stretch
    config.alpha_pattern = {key: value * stretch for key, value in (config.alpha_pattern or {}).items()}
    model.peft_config[adapter] = config
    for layer in layers:
        _exchange(layer, *factors[layer.name])
        layer.module.r[adapter] *= 2
        layer.module.lora_alpha[adapter] *= stretch


def _exchange(layer: LoraLayer, first: Tensor, second: Tensor) -> None:
    """New weights in the old modules: new modules would draw random numbers to fill them."""
    down, up = layer.module.lora_A[layer.adapter], layer.module.lora_B[layer.adapter]
    for module, value in ((down, first), (up, second)):
        old = module.weight
        module.weight = nn.Parameter(value.to(old.device, old.dtype).contiguous(), requires_grad=old.requires_grad)
    down.out_features = up.in_features = first.shape[0]


@DEFENSES.register("salora")
class Salora(Defense):
    name = "salora"
    packs = True
    summary = "LoRA whose output change stays outside the safe replies' directions"
    passes = "1 forward + backward"
    needs = frozenset({"safety"})
    fresh_lora = True
    reference = "Li et al., SaLoRA, ICLR 2025"
    off = None  # the initialisation from W's singular vectors is no setting

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        safety_rank: int = option(32, "r_s, protected output directions of every adapted module.", least=1)
        task_rank: int = option(32, "r_t, output directions of the task from which B starts.", least=1)
        calibration: int = option(
            128, "safety pairs and task rows, each, from which the directions are taken.", least=1
        )

    config: Config

    def validate(self, run: TrainingRun) -> None:
        """One fresh, plain LoRA adapter in float32; task rows that can be looked up; ranks below the modules' sizes."""
        layers = lora_layers(run.model, defense=self.name)
        require_float32(run.model)
        task, optimizer = run.data.task, optimizer_name(run.args)
        columns = task.column_names if isinstance(task, Dataset) else ()
        refuse_where([
            (not has_idle_adapter(run.model),
             "defense 'salora' sets LoRA's factors itself; this adapter already changes the model",
             "start from a fresh adapter: adapter_policy: merge, init_lora_weights: true"),
        ])  # fmt: skip
        for layer in layers:
            self._require_room(layer)
        refuse_where([
            (not isinstance(task, Dataset),
             "defense 'salora' draws task rows before training; this task data is a stream",
             "load the task data as a whole (streaming=False)"),
            (getattr(run.args, "packing", False) or "input_ids" not in columns,
             "defense 'salora' reads single tokenised task rows; these are packed, pairs, or not tokenised",
             "use SFT with packing=False, without skip_prepare_dataset"),
            (any(name in optimizer for name in MATRIX_OPTIMIZERS),
             f"defense 'salora' with optimizer {optimizer}: it looks at whole matrices, and the matrices trained here "
             "are C B and a fixed half beside it, not B",
             "use adamw_torch, or another optimizer that works element by element"),
            (run.optimizer is not None,
             "defense 'salora' exchanges the adapter's parameters, which this optimizer already holds",
             "pass optim=..., or optimizer_cls_and_kwargs=..., instead of optimizers=..."),
        ])  # fmt: skip

    def _require_room(self, layer: LoraLayer) -> None:
        d_out, d_in = layer.base_weight.shape
        for name, value, limit in (
            ("safety_rank", self.config.safety_rank, d_out - 1),
            ("task_rank", self.config.task_rank, d_out),
            ("LoRA's rank", layer.A.shape[0], min(d_in, d_out)),
        ):
            if value > limit:
                raise ConfigError(
                    f"salora: {name} is {value}; {layer.name} ({d_out} x {d_in}) allows at most {limit}",
                    remedy=f"use a {name} of {limit} or less, or leave this module out of lora.target_modules",
                )

    def initialise(self, run: TrainingRun) -> None:
        """Find C, A_0 and B_0 at theta_0 and make the adapter [C B_0, -C B_0] [A_0; A_0]."""
        layers, config, safe_rows = lora_layers(run.model, defense=self.name), self.config, run.data.safe
        rows = [safe_rows[i] for i in _drawn(run, len(safe_rows), config.calibration, "safety")]
        task = task_rows(run, config.calibration)
        self._directions: dict[str, Tensor] = {}
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        for group in groups(layers):
            safe, own = reply_moments(run, group, rows), reply_moments(run, group, task)
            # Signs and the order of near-equal directions are the library's: one rank decides for all.
            found = [self._start(layer, safe, own) for layer in group] if rank() == 0 else []
            for layer, (directions, a, b) in zip(group, gather_objects(found)[0], strict=True):
                self._directions[layer.name] = directions.to(layer.B)
                factors[layer.name] = torch.cat([a, a]), torch.cat([b, -b], dim=1)
        short = [name for name, v in self._directions.items() if v.shape[1] < config.safety_rank]
        if short:
            logger.warning(
                "salora: the safe replies have fewer than %d output directions in %d of %d modules, the first %s",
                config.safety_rank, len(short), len(layers), short[0],
            )  # fmt: skip
        double_rank(run.model, layers, factors)

    def _start(self, layer: LoraLayer, safe: SecondMoments, task: SecondMoments) -> tuple[Tensor, Tensor, Tensor]:
        """V_s, A_0 and C B_0 of one module, on the CPU."""
        v_s, v_t = safe.directions(layer, self.config.safety_rank), task.directions(layer, self.config.task_rank)
        u, s, z = truncated_svd(layer.base_weight, layer.A.shape[0])
        b = v_t @ (v_t.T @ (u * s.sqrt()))
        return v_s.cpu(), (z * s.sqrt()).T.cpu(), outside(v_s, b).cpu()

    def attach(self, run: TrainingRun) -> None:
        """Note the fixed halves, which a resumed run has from its checkpoint."""
        self._layers = [(layer, layer.A.shape[0] // 2) for layer in lora_layers(run.model, defense=self.name)]
        self._fixed = [(x.A.detach()[r:].clone(), x.B.detach()[:, r:].clone()) for x, r in self._layers]

    @torch.no_grad()
    def on_gradient(self, run: TrainingRun) -> None:
        """No gradient for the fixed halves; that of P without its part in the safety directions."""
        for layer, r in self._layers:
            if layer.A.grad is not None:
                layer.A.grad[r:] = 0
            if layer.B.grad is not None:
                layer.B.grad[:, r:] = 0
                layer.B.grad[:, :r] = outside(self._directions[layer.name], layer.B.grad[:, :r])

    @torch.no_grad()
    def after_step(self, run: TrainingRun) -> None:
        """Undo the decay of the fixed halves; P has left the allowed space where the step is not linear (Adam)."""
        for (layer, r), (a_0, b_0) in zip(self._layers, self._fixed, strict=True):
            layer.A[r:] = a_0
            layer.B[:, r:] = b_0
            layer.B[:, :r] = outside(self._directions[layer.name], layer.B[:, :r])

    def state_dict(self) -> dict[str, object]:
        """The safety directions: the same calibration elsewhere would find them only to rounding."""
        return {"directions": self._directions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, stored in state["directions"].items():
            self._directions[name] = stored.to(self._directions[name])
