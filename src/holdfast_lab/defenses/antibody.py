"""Antibody: a flat harmful loss in alignment, then less weight for rows that the model would rather refuse.

Paper: Nguyen et al., *Antibody: Strengthening Defense Against Harmful Fine-Tuning for Large Language Models via
Attenuating Harmful Gradient Influence* (ICLR 2026); the formulas below are those of the authors' released code.
Alignment and fine-tuning are one run each.

Alignment. H are harmful pairs, R their prompts with generic refusals (`holdfast.data.refusals`), in turn by position:

    theta' = theta - rho g_H(theta) / (norm(g_H) + 1e-7),    g_flat = g_H(theta) - g_H(theta')
    g = g_safe(theta) + lambda g_flat + lambda_ref g_R(theta')
    cosine:  lambda = EMA_m( max(0, eta - <g_flat, g_safe> / (norm(g_flat) norm(g_safe) + 1e-8)) )
    ratio:   lambda = max(0, eta - <g_flat, g_safe> / norm(g_flat)^2)

cosine is the released code, ratio the formula of the publication (where eta is xi, and there is no average). cosine
keeps lambda within eta - 1 and eta + 1; a constant lambda (`lam`) without refusals is Booster.

Fine-tuning. Row i of a micro-batch has token-mean loss l_i, and r_i for a refusal of the same prompt, fixed by a hash
of the prompt; S_i and N_i are the sum of its token losses and their number; no gradient flows into w:

    w = softmax_i( (r_i - l_i) / temperature ),    loss = sum_i w_i S_i / sum_i w_i N_i

The micro-batch is that of all processes together. Of several in a step each counts by its scored tokens, as in plain
SFT, which equal weights reproduce; weights are not compared across them, so 2 x b rows are not one batch of 2b, and
micro-batches of one row, in which nothing can be weighted, are refused.

Departures from the authors' code:
* theta is copied and put back, and g_H is computed once, where the code copies the whole model and computes it twice;
* gradients of several micro-batches add up, where the code keeps the last one;
* harmful and scoring passes run without dropout, where scores with it would be noise; the trained pass has it;
* refusals are our own 60, where the code has about 100; harmful batches have the run's batch size;
* token accuracy and entropy, which TRL logs, are missing in fine-tuning: its loss is not used.
The authors go on training the same adapter in fine-tuning (`adapter_policy: continue`); the paper, *Beyond Average
Safety*, merges it first, aligns for 20 epochs, and has lambda_ref = 1, 20 times the authors' value (`preset: paper`);
it does not state eta and the momentum, which stay the authors'.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.constraint.gradients import ParameterSpace, Vector
from holdfast.core.errors import DataError
from holdfast.core.ranks import gather_rows, rank, world
from holdfast.data.encode import IGNORE, Encoded, collate
from holdfast.data.refusals import RefusalTokens, refused
from holdfast.scoring.completion import completion_losses, deterministic
from holdfast.training.hooks import DEFENSES, Inputs, Items, Need, TrainingRun, two_pass_only
from holdfast.training.side_pass import token_mean_nll
from holdfast_lab.building_blocks.options import Options, option
from holdfast_lab.building_blocks.side_term import LEFT_OUT, SideTermDefense, harmful_batch, harmful_step, refuse_where

MOMENTUM = 0.99  # of the average of lambda under the rule `cosine`


@DEFENSES.register("antibody")
class Antibody(SideTermDefense):
    name = "antibody"
    fsdp = True
    stages = ("align", "finetune")
    summary = "flat harmful loss in alignment; rows the model would rather refuse weigh less in fine-tuning"
    passes = "align: 4 forward + backward; finetune: 1 forward + backward, 2 forward"
    needs = frozenset({"harmful"})
    reference = "Nguyen et al., Antibody, ICLR 2026"
    off = MappingProxyType({"lam": 0.0, "lambda_ref": 0.0, "temperature": None})
    linear = False
    packs = True
    paper = MappingProxyType({"rho": 0.1, "lambda_ref": 1.0, "temperature": 1.0})

    @dataclass(frozen=True, kw_only=True)
    class Config(Options):
        rho: float = option(
            0.1, "alignment: length of the simulated harmful step, in all trainable parameters together.", above=0
        )
        eta: float = option(
            5.0, "alignment: lambda where flattening and safe gradient are orthogonal (the publication's xi).", least=0
        )
        rule: Literal["cosine", "ratio"] = option(
            "cosine", "alignment: cosine (the released code) or ratio (the publication).", choices=("cosine", "ratio")
        )
        momentum: float | None = option(
            None, "alignment: of lambda's average over steps; None: 0.99 for cosine, no average for ratio.",
            least=0, below=1,
        )  # fmt: skip
        lam: float | None = option(None, "alignment: a constant lambda instead; None: by the rule.", least=0)
        lambda_ref: float = option(0.05, "alignment: weight of the refusals after the harmful step.", least=0)
        harmful_batch_size: int | None = option(
            None, "alignment: harmful pairs per step, over all processes; None: as many as task rows.", least=1
        )
        temperature: float | None = option(
            1.0, "fine-tuning: of the softmax over rows, in nats per token; None (or inf): equal weights.", above=0
        )

        def __post_init__(self) -> None:
            if self.temperature == math.inf:
                object.__setattr__(self, "temperature", None)  # JSON has no infinity
            super().__post_init__()

        @property
        def smoothing(self) -> float:
            return self.momentum if self.momentum is not None else MOMENTUM if self.rule == "cosine" else 0.0

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._lambda: float | None = None
        self._seen: list[tuple[float, float]] = []

    @classmethod
    def needed(cls, stage: str) -> frozenset[Need]:
        return cls.needs if stage == "align" else frozenset()

    @classmethod
    def packed(cls, stage: str) -> bool:
        """In alignment, whose task loss is the usual one; in fine-tuning its weights are of rows already."""
        return stage == "align"

    by_rows = packed

    def validate(self, run: TrainingRun) -> None:
        """Refuse pairs without a prompt, and task losses that are not the mean over tokens of separate rows."""
        if run.progress.stage == "align":
            super().validate(run)
            harmful_batch(run, self.config.harmful_batch_size)
            for example in run.data.harmful_examples if self.config.lambda_ref > 0 else ():
                refused(example, 0)
        elif self.config.temperature is not None:
            _require_weightable(run)

    def attach(self, run: TrainingRun) -> None:
        super().attach(run)
        self._seen = []
        if run.progress.stage == "align":
            if self.config.lambda_ref > 0:
                self._refused = run.data.encode([refused(e, i) for i, e in enumerate(run.data.harmful_examples)])
        elif self.config.temperature is not None:
            self._refusals = RefusalTokens(run.data.tokenizer)

    def on_gradient(self, run: TrainingRun) -> None:
        """Alignment: add `lambda g_flat + lambda_ref g_R(theta')`. Fine-tuning: summarise the step's weights."""
        if run.progress.stage != "align":
            if self._seen:  # means of `1 / (B sum w^2)` and `r_i - l_i` over the step's micro-batches
                shares, scores = zip(*self._seen, strict=True)
                self._row = {"effective_rows": sum(shares) / len(shares), "score": sum(scores) / len(scores)}
            self._seen = []
            return
        c, space = self.config, run.space()
        chosen = harmful_batch(run, c.harmful_batch_size)
        rows = [run.data.harmful[i] for i in chosen]
        terms: list[Vector] = []
        with harmful_step(run, rows, c.rho) as (loss, flat):
            _, there = run.engine.side_gradient(rows, token_mean_nll(rows))
            if c.lambda_ref > 0:
                refusals = [self._refused[i] for i in chosen]
                terms.append(run.engine.side_gradient(refusals, token_mean_nll(refusals))[1])
        torch._foreach_sub_(flat, there)
        if not self._watch.accepts(run.progress.step, loss, *space.dots([(v, v) for v in (flat, *terms)])):
            self._row = {"lambda": None, "harmful_loss": None, **LEFT_OUT}
            return
        weight = self._weight(space, flat)
        space.add_to_gradient([flat, *terms], [weight, c.lambda_ref][: 1 + len(terms)])
        self._row = {"lambda": weight, "harmful_loss": loss}

    def _weight(self, space: ParameterSpace, flat: Vector) -> float:
        c, safe = self.config, space.task_gradient()
        if c.lam is not None:
            return c.lam
        product, flat2, safe2 = space.dots([(flat, safe), (flat, flat), (safe, safe)])
        raw = raw_weight(c.rule, c.eta, product, flat2, safe2)
        self._lambda = raw if self._lambda is None else c.smoothing * self._lambda + (1 - c.smoothing) * raw
        return self._lambda

    @two_pass_only
    def task_loss(
        self, run: TrainingRun, model: nn.Module, inputs: Inputs, items: Items, default: Callable[[], Tensor]
    ) -> Tensor:
        """Fine-tuning: the rows' losses, weighted. DDP averages over processes, as it does with TRL's loss."""
        temperature = self.config.temperature
        if run.progress.stage == "align" or temperature is None:
            return default()
        scores, tokens = self._scores(run, inputs)
        weights, relative = row_weights(scores, tokens, temperature)
        self._seen.append((float(1 / weights.square().sum() / len(weights)), float(scores.mean())))
        mine = relative[rank() * len(inputs["labels"]) :][: len(inputs["labels"])]
        losses = completion_losses(model, inputs, first_k=1)
        mean = (mine * losses.total).sum() / losses.tokens.sum()
        return (mean * run.data.token_share(inputs, items)).float()

    @torch.no_grad()
    def _scores(self, run: TrainingRun, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """`r_i - l_i` and the scored tokens of every row of all processes."""
        refusals = collate(self._refused_rows(run, inputs), run.data.tokenizer.pad_token_id)
        with deterministic(run.model):
            own = completion_losses(run.model, inputs, first_k=1)
            device = own.total.device
            other = completion_losses(run.model, {k: v.to(device) for k, v in refusals.items()}, first_k=1)
        both = torch.stack([other.per_token() - own.per_token(), own.tokens.double()], dim=1)
        scores, tokens = gather_rows(both).unbind(1)
        return scores, tokens

    def _refused_rows(self, run: TrainingRun, inputs: Inputs) -> list[Encoded]:
        found = []
        columns = (inputs[name].tolist() for name in ("input_ids", "attention_mask", "labels"))
        for ids, mask, labels in zip(*columns, strict=True):
            start = next((i for i, label in enumerate(labels) if label != IGNORE), 0)
            prompt = [token for token, real in zip(ids[:start], mask[:start], strict=True) if real]
            if not prompt:
                raise DataError("antibody: a task row without a prompt or a reply", remedy=NEEDS_PROMPTS)
            found.append(self._refusals.after(prompt, ids[start], run.args.max_length))
        return found

    def state_dict(self) -> dict[str, object]:
        return {"lambda": self._lambda, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lambda = state["lambda"]
        super().load_state_dict(state)


def raw_weight(rule: str, eta: float, product: float, flat2: float, safe2: float) -> float:
    """Lambda before averaging, from `<g_flat, g_safe>` and the two squared norms; eta where g_flat is zero."""
    scale = flat2 if rule == "ratio" else math.sqrt(flat2 * safe2) + 1e-8
    return max(0.0, eta - (product / scale if scale > 0 else 0.0))


def row_weights(scores: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`w = softmax(scores / temperature)`, and w relative to its mean over tokens: 1 for every row of equal scores."""
    weights = torch.softmax(scores.detach().double() / temperature, dim=0)
    return weights, weights * tokens.sum() / (weights * tokens).sum()


NEEDS_PROMPTS = "use prompt-completion rows in the fine-tuning stage (data with prompts, or completion_only_loss)"


def _require_weightable(run: TrainingRun) -> None:
    args, other = run.args, run.other_loss()
    off, stage = "switch it off", "antibody in the fine-tuning stage with"
    larger = "raise per_device_train_batch_size (the authors use 16) and lower gradient_accumulation_steps"
    refuse_where([
        (args.packing or args.padding_free, f"{stage} packed or padding-free rows: rows can then not be weighted", off),
        (other is not None, f"{stage} {other}: rows are weighted by their log-likelihood", off),
        (args.truncation_mode != "keep_start", f"{stage} truncation_mode 'keep_end', which cuts prompts away", off),
        (args.assistant_only_loss,
         f"{stage} assistant_only_loss, which scores several replies of a row, where one is refused", off),
        (args.per_device_train_batch_size * world() < 2,
         f"{stage} micro-batches of one row: its weight is 1, as in plain SFT", larger),
    ])  # fmt: skip
    first: dict[str, Any] = next(iter(run.data.task), {})
    unasked = "labels" in first and first["labels"][0] != IGNORE
    refuse_where([(unasked, "antibody: task rows without a prompt cannot be refused", NEEDS_PROMPTS)])
