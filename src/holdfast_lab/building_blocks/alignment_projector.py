"""C, the map onto what alignment changed in a module's outputs, from the alignment shift V (see `alignment_shift`).

    paper        C = V V^T / |V|_F
    orthogonal   C = U_k U_k^T,  U_k the k leading left singular vectors of V

The first is what SafeLoRA and AsFT use. It is NOT a projector: with k equal singular values sigma, every non-zero
eigenvalue is sigma / sqrt(k) = |V|_F / k, far below 1 for a merged alignment adapter, so that C is close to zero and
I - C to the identity. Where V = 0, C = 0.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from holdfast.core.errors import CheckpointError, ConfigError, UnsupportedError
from holdfast.models.alignment_shift import FactoredShift, Shift
from holdfast.models.lora_layers import LoraLayer
from holdfast_lab.building_blocks.options import Options, option

logger = logging.getLogger(__name__)

Kind = Literal["paper", "orthogonal"]
DENSE_RANK = 32  # k for a V without factors: the rank of the paper's alignment adapter
SMALLEST = 1e-6  # singular values below this share of the largest are rounding of float32


@dataclass(frozen=True)
class Projector:
    """C = F F^T with F = `matrix` (d_out x k), or C = `matrix` itself where `square`. Both may be stacks."""

    matrix: Tensor  # F or C
    square: bool = False  # whether it is C

    def apply(self, x: Tensor) -> Tensor:
        return self.matrix @ x if self.square else self.matrix @ (self.matrix.mT @ x)


@dataclass(frozen=True, kw_only=True)
class ProjectorOptions(Options):
    """Which C; the base of the options of SafeLoRA and AsFT."""

    projector: Kind = option(
        "paper", "`paper` (C = V V^T / |V|_F, the authors') or `orthogonal` (leading left singular vectors of V).",
        choices=get_args(Kind),
    )  # fmt: skip
    rank: int | None = option(
        None, "how many singular vectors; None: the rank of the alignment adapter, 32 where a model was given.", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.projector == "paper":
            raise ConfigError(
                f"{self.defense}: rank is {self.rank} with projector paper",
                remedy="rank is the number of singular vectors of the orthogonal projector; leave it out",
            )


@torch.no_grad()
def projectors(
    layers: Sequence[LoraLayer], shifts: Mapping[str, Shift], kind: Kind, rank: int | None = None
) -> dict[str, Projector]:
    """C of every module, one V in memory at a time, in float32 (float64 where the adapter is).

    `rank` is k of the orthogonal projector; None: the rank of V's factors, or `DENSE_RANK` where it has none.
    """
    found = {}
    for layer in layers:
        made = _projector(layer.name, shifts[layer.name], kind, rank)
        dtype = torch.promote_types(layer.B.dtype, torch.float32)
        found[layer.name] = Projector(made.matrix.to(layer.B.device, dtype), made.square)
    zero = [name for name, one in found.items() if one.matrix.shape[-1] == 0]
    if len(zero) == len(found):
        raise UnsupportedError(
            "the alignment shift is zero in every adapted module: there is nothing to anchor to",
            remedy="adapt modules that alignment changed, or give the model as it was before alignment",
        )
    if zero:
        logger.warning(
            "alignment did not change %d of %d adapted modules, the first %s: C = 0 there, so that their whole update "
            "counts as outside the alignment direction",
            len(zero), len(found), zero[0],
        )  # fmt: skip
    return found


def _projector(name: str, shift: Shift, kind: Kind, rank: int | None) -> Projector:
    if isinstance(shift, FactoredShift):
        vectors, values = _thin_svd(shift)
        norm = _finite(name, float(values.norm()))
        if kind == "paper":
            return Projector(vectors * (values / norm**0.5) if norm else vectors[:, :0])
        return Projector(vectors[:, : _kept(values, rank or len(values))])
    v = shift.matrix()
    norm = _finite(name, float(v.norm()))
    if norm == 0:
        return Projector(v[:, :0])
    if kind == "orthogonal":
        vectors, values = _leading(v.double())
        return Projector(torch.linalg.qr(vectors[:, : _kept(values, rank or DENSE_RANK)])[0])
    # The smaller of C and its factor V is kept.
    return Projector(v @ v.mT / norm, square=True) if v.shape[0] <= v.shape[1] else Projector(v / norm**0.5)


def _thin_svd(shift: FactoredShift) -> tuple[Tensor, Tensor]:
    """Left singular vectors and singular values of a product of thin factors, in float64, by two QR decompositions."""
    q, r = torch.linalg.qr(shift.left.double())
    _, r_right = torch.linalg.qr(shift.right.double().mT)
    u, values, _ = torch.linalg.svd(r @ r_right.mT, full_matrices=False)
    return q @ u, values


def _leading(v: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and singular values, largest first, from the eigenvectors of the smaller Gram matrix."""
    tall = v.shape[0] > v.shape[1]
    squares, vectors = torch.linalg.eigh(v.mT @ v if tall else v @ v.mT)
    values, vectors = squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    return (v @ vectors / values.clamp(min=1e-300) if tall else vectors), values


def _kept(values: Tensor, rank: int) -> int:
    return min(rank, int((values > SMALLEST * values.max()).sum())) if len(values) else 0


def _finite(name: str, norm: float) -> float:
    if not norm < float("inf"):
        what = f"the alignment shift of {name} is not finite"
        raise CheckpointError(what, remedy="restore the weights it is made of")
    return norm
