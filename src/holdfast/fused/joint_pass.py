"""Task and safety rows through the model once: the task's gradient, each constraint's, and every degradation.

    hidden = layers(all rows)          d_t = gradient of token t's loss by its hidden state (computed with the loss)
    task:        c_t = share of the token in the step's loss: the same for all, or for the tokens of a row
    constraint:  c_t = d mean_i weight(D_i) / d (loss of token t), from the rows' degradations D_i
    backward from c_t d_t; LoRA's gradients are summed group by group.

The model's head is never part of the backward, and a vocabulary of any size exists for a few hundred tokens at a time.

Skipping inactive rows: a constraint's term is flat where its majorizer is, and such a row's gradient is zero. With
`skip` the safety rows are passed over once without a gradient, and only those with a slope join the task: the same
step, cheaper when most rows are inactive.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.units import KL_UNITS
from holdfast.data.encode import Encoded
from holdfast.fused.body import EagerPasses
from holdfast.fused.packed_rows import Row, Scored, encoded_rows, scored
from holdfast.scoring.completion import CompletionLosses
from holdfast.scoring.degradation import in_unit, slope
from holdfast.scoring.head import Head, kl_and_gradient, nll_and_gradient, nll_with_statistics, over_pieces
from holdfast.scoring.reference_states import ReferenceStates
from holdfast.scoring.transfer import OnHost, to_device


@dataclass(frozen=True)
class Term:
    """One constraint's part of a pass."""

    rows: Sequence[Encoded]  # this process's rows of this micro-batch
    reference: Tensor  # their losses at theta_0, in the constraint's unit
    constraint: ChanceConstraint
    weight: Callable[[Tensor], Tensor]  # from degradations to the terms whose mean is constrained
    total: int  # rows of the whole step, over all processes
    drawn: Tensor | None = None  # what each row's term is multiplied by, where rows were not drawn alike

    def sum(self, degradations: Tensor) -> Tensor:
        """These rows' part of the mean of all terms."""
        terms = self.weight(degradations)
        if self.drawn is not None:
            terms = terms * to_device(self.drawn, terms.device).to(terms.dtype)
        return (terms / self.total).sum()


@dataclass
class Found:
    """What a pass measured; tensors on the device."""

    loss: Tensor  # the task's, scaled as given
    entropy: Tensor  # summed over the task's scored tokens, as is `correct`
    correct: Tensor
    degradations: dict[str, Tensor]  # of every term's rows, float64
    gradients: list[list[Tensor]]  # the task's and then every term's, each in the order of the adapter's parameters
    copy: OnHost | None = None  # of the numbers above, on its way before the backward is launched

    def send(self) -> None:
        """Queue the copy to the host."""
        numbers = [torch.stack([x.double() for x in (self.loss, self.entropy, self.correct)])]
        self.copy = OnHost(torch.cat([*numbers, *self.degradations.values()]))

    def on_host(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, entropy and correct tokens, and every term's degradations; float64. Does not wait for the backward."""
        assert self.copy is not None
        numbers, *each = torch.split(self.copy.get(), [3, *(len(d) for d in self.degradations.values())])
        return numbers, dict(zip(self.degradations, each, strict=True))


class JointPass:
    """One pass over the rows of the task and of all constraints.

    `kept` are the reference's states of all rows of sets whose unit is a KL; None passes over them, adapter off.
    """

    def __init__(self, passes: EagerPasses, kept: ReferenceStates | None = None) -> None:
        self.passes, self.kept = passes, kept
        self.model, self.device = passes.body.model, passes.body.device

    def run(
        self, task: Sequence[Row], scale: Tensor, terms: Mapping[str, Term], *, skip: bool = False,
        by_rows: bool = False,
    ) -> Found:  # fmt: skip
        """Degradations, loss and gradients.

        The sum of the task's token losses is multiplied by `scale`; with `by_rows`, the sum of its rows' mean losses.
        """
        places = {name: scored([encoded_rows(term.rows)])[0] for name, term in terms.items()}
        references = {name: self._reference(term) for name, term in terms.items()}
        known: dict[str, Tensor] = {}
        if skip and any(term.rows for term in terms.values()):
            known = self._looked_at(terms, references)
            terms, references = self._active(terms, references, known, places)
        sums = Found(scale, scale, scale, {}, [])
        rows = [list(task), *(encoded_rows(term.rows) for term in terms.values())]
        rows += [[] for _ in range(len(rows), self.passes.body.adapter.count)]  # a step that measures no constraint
        parts = [part.to(self.device) for part in scored(rows[: 1 + len(terms)])]
        none = torch.zeros(0, dtype=torch.float64, device=self.device)

        @torch.no_grad()
        def gradient_of(hidden: Tensor) -> Tensor:
            gradient = torch.zeros_like(hidden)
            head = Head(self.model)
            self._task(sums, head, hidden, gradient, parts[0], scale, by_rows)
            for (name, term), part in zip(terms.items(), parts[1:], strict=True):
                if term.rows:
                    sums.degradations[name], own = self._term(term, head, hidden, part, references[name])
                    gradient.index_copy_(0, part.at, own.to(gradient.dtype))
            sums.degradations = {name: known.get(name, sums.degradations.get(name, none)) for name in terms}
            sums.send()
            return gradient

        sums.gradients = self.passes.gradients(rows, gradient_of)[: 1 + len(terms)]
        return sums

    @staticmethod
    def _task(
        found: Found, head: Head, hidden: Tensor, gradient: Tensor, part: Scored, scale: Tensor, by_rows: bool
    ) -> None:
        """Write the task's part of the gradient, and its figures."""
        if not len(part.at):
            found.loss = found.entropy = found.correct = 0.0 * scale
            return
        one = nll_with_statistics(head, hidden.index_select(0, part.at), part.targets)
        if by_rows:
            shares = (1.0 / part.counts)[part.cell // part.width].to(one.values)
            one = one._replace(values=one.values * shares, gradients=one.gradients * shares.unsqueeze(1))
        found.loss = (one.values.sum() * scale).detach()
        found.entropy, found.correct = one.entropy.sum(), one.top1.sum()
        gradient.index_copy_(0, part.at, (one.gradients * scale).to(gradient.dtype))

    @staticmethod
    def _token_losses(head: Head, hidden: Tensor, part: Scored, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        """NLL of the scored tokens, or KL from the reference's states, and their gradients by the hidden states."""
        states = hidden.index_select(0, part.at)
        if reference is None:
            return over_pieces(nll_and_gradient(head), states, part.targets)
        return over_pieces(kl_and_gradient(head, head), states, reference)

    def _term(
        self, term: Term, head: Head, hidden: Tensor, part: Scored, reference: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Degradations of a term's rows, and the gradient of its part of the constraint by the hidden states."""
        values, gradients = self._token_losses(head, hidden, part, reference)
        with torch.enable_grad():
            values.requires_grad_()
            degradations = self._degradations(term, part, values)
            (slope,) = torch.autograd.grad(term.sum(degradations), values)
        return degradations.detach(), gradients * slope.unsqueeze(1)

    def _degradations(self, term: Term, part: Scored, values: Tensor) -> Tensor:
        c, counts = term.constraint, part.counts
        total = part.per_row(values)
        if c.unit == "kl_token":
            return total / counts
        losses = CompletionLosses(total, counts, part.per_row(values, c.first_k), counts.clamp(max=c.first_k))
        degradations = in_unit(losses, c)
        return degradations if c.unit in KL_UNITS else degradations - to_device(term.reference, self.device).to(total)

    def _reference(self, term: Term) -> Tensor | None:
        """Hidden states of the scored tokens at theta_0; None where the unit does not look at them.

        The head is the model's own: adapters that change it are not trained here.
        """
        if term.constraint.unit not in KL_UNITS or not term.rows:
            return None
        if self.kept is not None:
            return self.kept(term.rows)
        return self.completion_states(term.rows, adapters=False)

    def completion_states(self, rows: Sequence[Encoded], *, adapters: bool) -> Tensor:
        """Hidden states that predict the rows' scored tokens."""
        group = [encoded_rows(rows)]
        hidden = self.passes.states(group, adapters=adapters)
        return hidden.index_select(0, scored(group)[0].to(self.device).at)

    def side(
        self, rows: Sequence[Encoded], coefficient: float, reference: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Each row's sum of token NLLs, or of KLs from the reference's states, times `coefficient`; their gradient."""
        groups = [encoded_rows(rows), *([] for _ in range(1, self.passes.body.adapter.count))]
        part = scored(groups[:1])[0].to(self.device)
        sums: list[Tensor] = []

        @torch.no_grad()
        def gradient_of(hidden: Tensor) -> Tensor:
            values, gradients = self._token_losses(Head(self.model), hidden, part, reference)
            sums.append(part.per_row(values) * coefficient)
            return torch.zeros_like(hidden).index_copy_(0, part.at, (gradients * coefficient).to(hidden.dtype))

        gradient = self.passes.gradients(groups, gradient_of, dropout=False)[0]
        return sums[0], gradient

    @torch.no_grad()
    def look(self, term: Term) -> Tensor:
        """The degradations of a term's rows, by a pass that is not recorded: it is rare and of any size."""
        rows = [encoded_rows(term.rows)]
        part = scored(rows)[0].to(self.device)
        reference = None
        if term.constraint.unit in KL_UNITS:
            off = partial(self.passes.states, rows, adapters=False, once=True)
            reference = off().index_select(0, part.at) if self.kept is None else self.kept(term.rows)
        hidden = self.passes.states(rows, once=True)
        values, _ = self._token_losses(Head(self.model), hidden, part, reference)
        return self._degradations(term, part, values)

    @torch.no_grad()
    def _looked_at(self, terms: Mapping[str, Term], references: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Degradations of all terms' rows, by one pass without a gradient."""
        rows = [encoded_rows(term.rows) for term in terms.values()]
        hidden, head = self.passes.states(rows), Head(self.model)
        degradations = {}
        for (name, term), part in zip(terms.items(), scored(rows), strict=True):
            if term.rows:
                degradations[name], _ = self._term(term, head, hidden, part.to(self.device), references[name])
        return degradations

    def _active(
        self, terms: Mapping[str, Term], references: Mapping[str, Tensor | None], known: Mapping[str, Tensor],
        places: Mapping[str, Scored],
    ) -> tuple[dict[str, Term], dict[str, Tensor | None]]:  # fmt: skip
        """The terms with only those rows whose weight has a slope."""
        kept: dict[str, Term] = {}
        states: dict[str, Tensor | None] = {}
        slopes = {name: slope(terms[name].weight, d) for name, d in known.items()}
        for name, term in terms.items():
            on = (slopes[name] != 0).tolist() if name in slopes else []
            at = [i for i, active in enumerate(on) if active]
            drawn = None if term.drawn is None else term.drawn[at]
            kept[name] = replace(term, rows=[term.rows[i] for i in at], reference=term.reference[at], drawn=drawn)
            states[name] = reference = references[name]
            if reference is not None:
                part = places[name]
                mine = torch.tensor(on)[part.cell // part.width].nonzero().squeeze(1)
                states[name] = reference.index_select(0, mine.to(self.device))
        return kept, states
