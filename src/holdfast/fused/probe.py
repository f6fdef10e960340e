"""Packed rows tried on a model before a run relies on them: names do not tell how a model's tokens meet.

A few rows go through the model packed, and each by itself. Equal must be, token by token, the hidden states, and group
by group the adapter's gradients, no matrix of which may be far off; a row must not feel another one's tokens; and the
model must be the same function in training as in evaluation, since the fused step runs it in evaluation mode.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import ModelConfig
from holdfast.data.encode import Encoded, collate
from holdfast.fused.body import Body, EagerPasses
from holdfast.fused.packed_rows import encoded_rows, lay_out
from holdfast.models.library_errors import out_of_memory
from holdfast.scoring.completion import deterministic, hidden_states
from holdfast.scoring.head import causal_lm

# Relative differences, by whether all is computed in float32: of a token's hidden state, of a group's gradient as one
# vector, of one matrix of it, and of numbers that should not change. All but the last are rounding.
HIDDEN = {True: 1e-3, False: 0.1}
GRADIENT = {True: 1e-3, False: 0.15}
MATRIX = {True: 1e-2, False: 0.5}  # in low precision at least: or `NOISE` times what padding changes in that matrix
UNCHANGED = {True: 1e-5, False: 5e-3}
NOISE = 4.0  # what rounding may be, in multiples of what padding changes
LARGEST = {True: 1e-2, False: 0.5}  # and at most
SAME_FUNCTION = "the model is another function in training than in evaluation"

Found = tuple[Tensor, list[list[Tensor]]]
"""Hidden states (tokens, width) and every group's gradient."""


def packing_problem(passes: EagerPasses, rows: Sequence[Encoded], pad_token_id: int) -> str | None:
    """Why packed rows are not the model's own rows; None when both give the same."""
    groups = [list(rows[g :: passes.body.adapter.count]) for g in range(passes.body.adapter.count)]
    probe = _Probe(passes.body, groups, pad_token_id)
    try:
        devices = [torch.cuda.current_device()] if passes.body.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            return probe.problem()
    except UnsupportedError as error:
        return str(error.what)
    except (TypeError, RuntimeError, ValueError, AttributeError, IndexError, KeyError, AssertionError) as error:
        if out_of_memory(error):
            return "there is not enough memory to try packed rows"
        return f"packed rows fail: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


class _Probe:
    """The passes over one choice of rows, dealt to the adapter's groups."""

    def __init__(self, body: Body, groups: Sequence[Sequence[Encoded]], pad_token_id: int) -> None:
        self.body, self.groups, self.pad_token_id = body, groups, pad_token_id
        self.rows = [row for group in groups for row in group]
        with body.precision():
            mixed = torch.is_autocast_enabled(body.device.type)
        self.exact = causal_lm(body.model).dtype == torch.float32 and not mixed

    def problem(self) -> str | None:
        packed = self._packed()
        if not self._alone_in_its_row():
            return "a row's hidden states change with those packed beside it"
        seed = _seed(packed[0])
        alone, padded = self._own(seed, [[row] for row in self.rows]), self._own(seed, [self.rows])
        gradient, matrices = _gradient_gaps(packed[1], alone[1])
        noise, noises = _gradient_gaps(padded[1], alone[1])
        for what, gap, most in (
            ("hidden states", _worst(packed[0], alone[0]), self._rounding(HIDDEN, _worst(padded[0], alone[0]))),
            ("gradients", gradient, self._rounding(GRADIENT, noise)),
            *(("gradients in one matrix", *one) for one in zip(matrices, map(self._of_matrix, noises), strict=True)),
        ):
            if not gap <= most:
                return f"packed rows give other {what} (by {gap:.2g} relative)"
        return None if self._trains_as_it_evaluates() else SAME_FUNCTION

    def _rounding(self, tolerance: Mapping[bool, float], noise: float) -> float:
        """What rounding may explain, where padding alone changes as much as `noise`."""
        return min(max(tolerance[self.exact], NOISE * noise), LARGEST[self.exact])

    def _of_matrix(self, noise: float) -> float:
        """The same for a single matrix, of which low precision can leave nothing but rounding.

        Where padding alone changes a quarter of it, the bound reaches 1, which no gradient is sure to miss: such a
        matrix is judged by the gradient as a whole alone.
        """
        bound = MATRIX[self.exact]
        return bound if self.exact or not math.isfinite(noise) else max(bound, NOISE * noise)

    def _packed(self) -> Found:
        layout = lay_out([encoded_rows(group) for group in self.groups]).to(self.body.device)
        with self.body.running(), torch.enable_grad():
            hidden = self.body.forward(layout)
            return hidden.detach().float(), self.body.backward(hidden, _seed(hidden.detach()))

    @torch.no_grad()
    def _alone_in_its_row(self) -> bool:
        """Whether exchanging the tokens of every second row leaves the others as they were."""
        pool = [token for row in self.rows for token in row.input_ids]
        rows, kept = [], []
        for i, row in enumerate(self.rows):
            ids = row.input_ids if i % 2 else tuple(pool[(k * 7 + 3) % len(pool)] for k in range(len(row.input_ids)))
            rows.append((ids, row.labels))
            kept += [bool(i % 2)] * len(ids)
        with self.body.running():
            before, after = (
                self.body.forward(lay_out([some]).to(self.body.device)).float()
                for some in (encoded_rows(self.rows), rows)
            )
        same = torch.tensor(kept, device=before.device)
        return not any(kept) or _worst(after[same], before[same]) <= UNCHANGED[self.exact]

    def _own(self, seed: Tensor, batches: Sequence[Sequence[Encoded]]) -> Found:
        """By the model's own forward, in batches of the rows in their order."""
        body = self.body
        sums = [[torch.zeros_like(p) for p in body.adapter.parameters] for _ in self.groups]
        states, start, at = [], 0, 0
        group_of = [g for g, group in enumerate(self.groups) for _ in group]
        for rows in batches:
            of_row = group_of[at : at + len(rows)]
            for g in sorted(set(of_row)):
                # A forward for each group: a graph kept for the next one would hold all that checkpoints run again. And
                # until the backward is done, since checkpoints run the layers again there.
                with body.without_reentry(), deterministic(body.model), torch.enable_grad():
                    hidden = self._states(rows)
                    mine = [own == g for own, row in zip(of_row, rows, strict=True) for _ in row.input_ids]
                    part = seed[start : start + len(hidden)] * torch.tensor(mine, device=seed.device)[:, None]
                    found = torch.autograd.grad(
                        hidden, body.adapter.parameters, part.to(hidden.dtype), allow_unused=True
                    )
                sums[g] = [total if x is None else total + x for total, x in zip(sums[g], found, strict=True)]
            states.append(hidden.detach().float())
            start, at = start + len(hidden), at + len(rows)
        return torch.cat(states), sums

    def _states(self, rows: Sequence[Encoded]) -> Tensor:
        body = self.body
        batch = {name: tensor.to(body.device) for name, tensor in collate(rows, self.pad_token_id).items()}
        real = batch["attention_mask"].bool()
        with body.precision():
            return hidden_states(body.model, batch)[real]

    @torch.no_grad()
    def _trains_as_it_evaluates(self) -> bool:
        with self.body.without_reentry(), deterministic(self.body.model):
            evaluated = self._states(self.rows).float()
            with _training(self.body):
                trained = self._states(self.rows).float()
        return _worst(trained, evaluated) <= UNCHANGED[self.exact]


@contextmanager
def _training(body: Body) -> Iterator[None]:
    """Every module in training mode but LoRA's own dropout, which the fused step knows."""
    own = {id(m) for layer in body.adapter.layers for m in layer.module.lora_dropout.modules()}
    before = [(module, module.training) for module in body.modules]
    try:
        for module, _ in before:
            module.training = id(module) not in own or not isinstance(module, _DropoutNd)
        yield
    finally:
        for module, was in before:
            module.training = was


def _seed(hidden: Tensor) -> Tensor:
    """Some gradient, the same at every call: random signs, so that tokens and with them groups have unlike gradients.

    Groups of like gradients (those of refusals, by anything that hidden states have in common) could be exchanged
    without a difference beyond rounding.
    """
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, hidden.shape, generator=draw, dtype=torch.int8)
    found: Tensor = (2.0 * signs - 1.0).to(hidden) / float(hidden.shape[-1]) ** 0.5
    return found


def _worst(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a token, relative to its size."""
    size = expected.norm(dim=-1)
    gaps: Tensor = (found - expected).norm(dim=-1) / size.clamp(min=1e-2 * float(size.mean()) + 1e-12)
    return float(gaps.max())


def _gradient_gaps(
    found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]
) -> tuple[float, list[float]]:
    """The largest relative difference of a group's gradient as one vector, and of every matrix of it; NaN: infinite.

    A single matrix is too small a sample of rounding to be held to the same bound: in bfloat16, with four refusals in
    two groups and a model of 135M parameters, one was 11 % off where the group's gradient was 5 %. With one of 1.5B the
    first layer's keys, whose biases are large, were 31 % off by padding alone, all others at most 9 %. Matrices far
    smaller than the largest of their group are rounding and count by that.
    """
    groups, matrices = [], []
    for xs, ys in zip(found, expected, strict=True):
        apart = [float((x - y).norm()) for x, y in zip(xs, ys, strict=True)]
        sizes = [float(y.norm()) for y in ys]
        groups.append(math.hypot(*apart) / max(math.hypot(*sizes), 1e-12))
        matrices.append([gap / max(size, 0.05 * max(sizes), 1e-12) for gap, size in zip(apart, sizes, strict=True)])
    return _largest(groups), [_largest(of_groups) for of_groups in zip(*matrices, strict=True)]


def _largest(gaps: Sequence[float]) -> float:
    """As `max`, which passes over a NaN that is not the first."""
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def probe_rows(examples: Sequence[Encoded], config: ModelConfig, longest: int | None) -> list[Encoded]:
    """A few rows of different lengths, on which packing is tried, and one beyond the model's windows.

    Args:
        config: the text model's; attention windows and chunks change nothing for rows that they hold.
        longest: the longest row the run may have; None where nothing bounds it.
    """
    ordered = sorted(examples, key=lambda e: len(e.input_ids))
    rows = [ordered[i] for i in sorted({round(i * (len(ordered) - 1) / 3) for i in range(4)})]
    while len(rows) < 3:  # of a very small set; rows only differ in their lengths
        rows.append(_stretched(rows, max(2, len(rows[-1].input_ids) // 2)))
    bound = min(n for n in (longest, getattr(config, "max_position_embeddings", None), 1 << 30) if n)
    beyond = [window + 1 + window // 8 for window in windows(config) if window < bound]
    if beyond and max(beyond) > len(rows[-1].input_ids):
        rows.append(_stretched(rows, min(bound, max(beyond))))
    return rows


def windows(config: ModelConfig) -> list[int]:
    """Lengths in a config at which attention or another mixer may change what it does."""
    named = [n for name, n in vars(config).items() if "window" in name or "chunk" in name]
    return sorted({n for n in named if type(n) is int and n > 1})


def _stretched(rows: Sequence[Encoded], length: int) -> Encoded:
    """A row of any length from the tokens of others."""
    pool = [token for row in rows for token in row.input_ids]
    ids = tuple(pool[i % len(pool)] for i in range(length))
    return Encoded("probe", ids, ids, False)
