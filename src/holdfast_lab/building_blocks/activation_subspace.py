"""Which output directions a linear module uses on given tokens: top right singular vectors of F = X W^T.

X holds one input of the module per token. Neither X nor F is kept: F^T F is added up where the module has no more
outputs than inputs, X^T X elsewhere, and F^T F = W (X^T X) W^T. The sums are in float64: squaring halves the digits,
and the order of summation (the number of processes) must not decide which directions are found.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.core.errors import UnsupportedError
from holdfast.core.ranks import sum_in_place
from holdfast.models.lora_layers import LoraLayer

EXACT_UP_TO = 2048  # rows of a matrix that is decomposed in full; larger ones by subspace iteration
ITERATIONS = 30
OVERSAMPLING = 16
NULL = 1e-10  # squared singular values below this share of the largest are rounding
MEMORY = 4 * 2**30  # bytes of one sweep's sums; SaLoRA holds those of two


def groups(layers: Sequence[LoraLayer], memory: int = MEMORY) -> Iterator[list[LoraLayer]]:
    """Layers in order, in groups whose sums fit into `memory`, at least one in each."""
    group: list[LoraLayer] = []
    for layer in layers:
        if group and sum(8 * min(one.base_weight.shape) ** 2 for one in (*group, layer)) > memory:
            yield group
            group = []
        group.append(layer)
    if group:
        yield group


class SecondMoments:
    """Sums of squares of the inputs or outputs of adapted modules, over tokens."""

    def __init__(self, layers: Sequence[LoraLayer]) -> None:
        self._layers = list(layers)
        self._sums = [
            torch.zeros(min(w.shape), min(w.shape), dtype=torch.float64, device=w.device)
            for w in (layer.base_weight for layer in layers)
        ]

    @contextmanager
    def counting(self, tokens: Tensor) -> Iterator[None]:
        """A context in which a forward of the model adds those of its tokens that `tokens` (rows, positions) marks."""
        handles = [
            layer.module.register_forward_pre_hook(
                lambda _, args, layer=layer, total=total: self._add(layer, total, args[0], tokens)
            )
            for layer, total in zip(self._layers, self._sums, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    @torch.no_grad()
    def _add(layer: LoraLayer, total: Tensor, x: Tensor, tokens: Tensor) -> None:
        if x.shape[:-1] != tokens.shape:
            raise UnsupportedError(
                f"the adapted module {layer.name} sees inputs of shape {tuple(x.shape)} in a batch of "
                f"{tuple(tokens.shape)} tokens: which of them are replies is unknown",
                remedy="adapt modules of the transformer blocks that see every token (attention, MLP)",
            )
        seen, weight = x[tokens.to(x.device)].double(), layer.base_weight
        if weight.shape[0] <= weight.shape[1]:
            seen = seen @ weight.double().T
        total.addmm_(seen.T, seen)

    def reduce(self) -> None:
        sum_in_place(self._sums)

    def directions(self, layer: LoraLayer, count: int) -> Tensor:
        """V: the top right singular vectors of F as columns (d_out, at most `count`), float64.

        There are fewer where F has no more of them: a further one would be rounding noise.
        """
        weight, total = layer.base_weight.double(), self._sums[self._layers.index(layer)]
        rows = weight.shape[0]

        def square(q: Tensor) -> Tensor:
            return total @ q if len(total) == rows else weight @ (total @ (weight.T @ q))

        values, vectors = top_eigenvectors(square, rows, count, weight.device)
        if not values[0] > 0:
            what = f"the adapted module {layer.name} sees no token of the model's text"
            raise UnsupportedError(what, remedy="leave it out of lora.target_modules")
        return vectors[:, values > NULL * values[0]]


def top_eigenvectors(
    apply: Callable[[Tensor], Tensor], size: int, count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Largest eigenvalues, in falling order, and their eigenvectors as columns, of a positive semidefinite matrix.

    `apply` multiplies the matrix (size, size) with float64 columns. Above `EXACT_UP_TO` rows by subspace iteration from
    a fixed start; the global random state is not touched.
    """
    count = min(count, size)
    if size <= EXACT_UP_TO:
        basis = torch.eye(size, dtype=torch.float64, device=device)
    else:
        start = torch.randn(
            size, min(count + OVERSAMPLING, size), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        basis = torch.linalg.qr(start.to(device)).Q
        for _ in range(ITERATIONS):
            basis = torch.linalg.qr(apply(basis)).Q
    small = basis.T @ apply(basis)
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    return values[-count:].flip(0), (basis @ vectors[:, -count:]).flip(1)


def truncated_svd(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (d_out, r), S (r) and Z (d_in, r) of the best approximation `U diag(S) Z^T` of that rank, in float64."""
    weight = weight.double()
    if weight.shape[0] < weight.shape[1]:
        z, s, u = truncated_svd(weight.T, rank)
        return u, s, z
    _, basis = top_eigenvectors(lambda q: weight.T @ (weight @ q), weight.shape[1], rank, weight.device)
    u, s, turned = torch.linalg.svd(weight @ basis, full_matrices=False)
    return u, s, basis @ turned.T
