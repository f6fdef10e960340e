"""Memory and messages of one training step, per rank: from tensor shapes alone, and the planned table of docs/scale.md.

A message counts with the bytes of the whole tensor, as every rank has it before a reduction or after a gathering. Of
these a ring sends and receives, per rank,

    all-reduce                   2 (N - 1) / N  bytes
    all-gather, reduce-scatter     (N - 1) / N  bytes

DDP all-reduces the task's gradient and each safety set's. FSDP2 gathers every unit (embedding, each layer, head) in the
forward and the resharded ones again in the backward, of each task and safety micro-batch. It reduce-scatters what is
trained after the last task micro-batch (accelerate holds whole gradients until then) and after each safety micro-batch.
Before a KL an adapter is off for one more forward; without an adapter the reference's states are kept in host memory.
DeepSpeed all-reduces the task's gradient (ZeRO-2: that of every micro-batch) and gathers the trained weights after the
step; each safety set's gradient is all-reduced once. Losses, flags and inner products (below 1 KiB) are left out.

    python -m benchmarks.scale        prints the table
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

GIB = 2**30
CARD = 80  # GiB: what the table calls too much
COUNTS = (1, 2, 4, 8, 16, 32, 64)
BUCKET = 500_000_000  # numbers that DeepSpeed gathers before it reduces them, unless `reduce_bucket_size` is set


@dataclass(frozen=True)
class Shape:
    """A Llama-like model, whose embedding and head are two matrices."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int

    def projections(self) -> dict[str, tuple[int, int]]:
        """The linear maps of a layer: rows and columns of their weights."""
        h, kv = self.hidden, self.hidden // self.heads * self.key_heads
        attention = {"q": (h, h), "k": (kv, h), "v": (kv, h), "o": (h, h)}
        return attention | {"gate": (self.inner, h), "up": (self.inner, h), "down": (h, self.inner)}


SHAPES = (
    Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256),
    Shape("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 152064),
    Shape("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128256),
)


@dataclass(frozen=True)
class Plan:
    """How a model is trained; `rank` 0: all weights. Bytes: of a stored frozen number, and of one in a message."""

    shape: Shape
    ranks: int
    engine: Literal["ddp", "fsdp2", "zero1", "zero2"]
    rank: int = 16
    adapted: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    stored: float = 2.0  # 0.5 for QLoRA, in linear maps alone
    plain: float = 2.0  # embedding and head
    sent: float = 2.0  # FSDP2 gathers and reduces in the type it computes in; DDP and DeepSpeed send float32
    packed: bool = False  # 4-bit weights are sent as they are stored
    safety_sets: int = 2
    micro_batches: int = 1
    safety_micro_batches: int = 1
    kl: bool = True
    rows: int = 4
    length: int = 1024
    bucket: int = BUCKET  # of DeepSpeed

    @property
    def cut(self) -> bool:
        """Whether every rank holds a part of the weights only."""
        return self.engine == "fsdp2" and self.ranks > 1


class Tensor(NamedTuple):
    rows: int
    columns: int
    trained: bool

    def numbers(self, ranks: int = 1) -> int:
        """Its numbers; FSDP2 cuts the rows into equal parts and fills up the last."""
        return math.ceil(self.rows / ranks) * ranks * self.columns


# -- tensors -----------------------------------------------------------------------------------------------------------


def layer(plan: Plan) -> list[Tensor]:
    """Frozen maps with their adapters, or trained maps; and two norms."""
    full, found = plan.rank == 0, [Tensor(plan.shape.hidden, 1, plan.rank == 0)] * 2
    for name, (rows, columns) in plan.shape.projections().items():
        found.append(Tensor(rows, columns, full))
        if not full and name in plan.adapted:
            found += [Tensor(plan.rank, columns, True), Tensor(rows, plan.rank, True)]
    return found


def outside(plan: Plan) -> list[Tensor]:
    """The embedding, the head and the last norm."""
    matrix = Tensor(plan.shape.vocabulary, plan.shape.hidden, plan.rank == 0)
    return [matrix, matrix, Tensor(plan.shape.hidden, 1, plan.rank == 0)]


def tensors(plan: Plan) -> Iterator[Tensor]:
    yield from outside(plan)
    for _ in range(plan.shape.layers):
        yield from layer(plan)


def trained(plan: Plan, ranks: int = 1) -> int:
    """How many numbers are trained, with what FSDP2 fills up for so many ranks."""
    return sum(t.numbers(ranks) for t in tensors(plan) if t.trained)


def parameters(plan: Plan) -> int:
    return sum(t.numbers() for t in tensors(plan))


# -- messages ----------------------------------------------------------------------------------------------------------


class Messages(NamedTuple):
    """Bytes a step of whole tensors, by operation."""

    all_reduce: int
    all_gather: int
    reduce_scatter: int

    def on_the_wire(self, ranks: int) -> float:
        """Bytes that a rank sends in a ring, and as many that it receives."""
        return (ranks - 1) / ranks * (2 * self.all_reduce + self.all_gather + self.reduce_scatter)


def messages(plan: Plan) -> Messages:
    """Of one step."""
    if plan.ranks == 1:
        return Messages(0, 0, 0)
    if plan.engine != "fsdp2":
        reductions = plan.micro_batches if plan.engine == "zero2" else 1
        fetched = 0 if plan.engine == "ddp" else 4 * aligned(plan)
        return Messages(4 * trained(plan) * (reductions + plan.safety_sets), fetched, 0)
    safety = plan.safety_sets * plan.safety_micro_batches
    gathered = plan.micro_batches * _gathered(plan, kl=False) + safety * _gathered(plan, kl=plan.kl and plan.rank > 0)
    reduced = (1 + safety) * plan.sent * trained(plan, plan.ranks)
    return Messages(0, round(gathered), round(reduced))


def aligned(plan: Plan) -> int:
    """The trained numbers as DeepSpeed lays them out: an even number for every rank, of matrices and of norms apart."""
    part, moved = 2 * plan.ranks, [t for t in tensors(plan) if t.trained]
    groups = [[t.numbers() for t in moved if t.columns > 1], [t.numbers() for t in moved if t.columns == 1]]
    return sum(math.ceil(sum(group) / part) * part for group in groups)


def _gathered(plan: Plan, *, kl: bool) -> float:
    """Bytes gathered in one pass: the layers forward and backward; with a KL, once more forward, as theta_0.

    Head and last norm stay whole until the pass ends; the embedding is fetched again before the first layer's backward.
    """
    layers = plan.shape.layers * _sent(plan, layer(plan))
    once = _sent(plan, outside(plan))
    embedding = _sent(plan, outside(plan)[:1])
    return once + embedding + 2 * layers + kl * (embedding + layers)


def _sent(plan: Plan, unit: Sequence[Tensor]) -> float:
    """Bytes of a unit on its way; packed weights of linear maps travel packed."""
    packed = [t for t in unit if plan.packed and not t.trained and t.columns > 1 and t.rows != plan.shape.vocabulary]
    plain = sum(t.numbers(plan.ranks) for t in unit) - sum(t.numbers(plan.ranks) for t in packed)
    return plan.sent * plain + plan.stored * sum(t.numbers() for t in packed)


# -- memory ------------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes on one rank; kernels, fragmentation and the CUDA context come on top."""

    weights: float  # its own part of them
    whole: float  # what FSDP2 has gathered at one time; DeepSpeed's bucket, or a whole gradient twice
    training_state: float
    activations: float


def memory(plan: Plan) -> Memory:
    """The largest parts of a rank's memory.

    training state = 4 bytes * (weights of the adapter, gradient, Adam's two moments, snapshot, and of each safety set
    the gradient and its average), under DeepSpeed a part of these and the adapter whole; activations, with gradient
    checkpointing = tokens * (each layer's input, about 17 tensors of one layer that is run again, and the logits in
    float32 with their gradient).
    """
    parts, count = plan.ranks if plan.cut else 1, trained(plan)
    frozen = parameters(plan) - count
    matrices = 0 if plan.rank == 0 else sum(t.numbers() for t in outside(plan))
    weights = ((frozen - matrices) * plan.stored + matrices * plan.plain) / parts
    state, whole = 4 * (trained(plan, parts) / parts) * (5 + 2 * plan.safety_sets), 0.0
    if plan.cut:
        whole = 2 * _sent(plan, layer(plan)) + _sent(plan, outside(plan))
        whole += plan.sent * count * (plan.micro_batches > 1)  # gradients, until the last micro-batch
    elif plan.engine != "ddp":
        state = 4 * count + 4 * (aligned(plan) / plan.ranks) * (5 + 2 * plan.safety_sets)
        state += 4 * count * (plan.engine == "zero1")  # gradients are not cut
        whole = 4.0 * max(plan.bucket, 2 * count)
    shape = plan.shape
    per_token = (shape.layers + 17) * shape.hidden * 2 + shape.vocabulary * 4 * 2
    return Memory(weights, whole, state, float(plan.rows * plan.length * per_token))


# -- the table ---------------------------------------------------------------------------------------------------------


def ways(shape: Shape, ranks: int) -> dict[str, Plan | None]:
    """The columns of the table; FSDP2 and DeepSpeed begin at two ranks."""
    lora = Plan(shape, ranks, "ddp")
    qlora = replace(lora, stored=0.516, packed=True)  # 4 bits, and 0.127 for the scales
    several = ranks > 1
    return {
        "LoRA, DDP": lora,
        "QLoRA, DDP": qlora,
        "LoRA, ZeRO-2": replace(lora, engine="zero2") if several else None,
        "LoRA, FSDP2": replace(lora, engine="fsdp2") if several else None,
        "QLoRA, FSDP2": replace(qlora, engine="fsdp2") if several else None,
        "all weights, FSDP2": replace(lora, engine="fsdp2", rank=0) if several else None,
    }


def cell(plan: Plan | None) -> str:
    """GiB of memory, and GiB on the wire in a step; a dash where there is no such plan or the card is too small."""
    if plan is None or (need := sum(memory(plan)) / GIB) > CARD:
        return "-"
    wire = messages(plan).on_the_wire(plan.ranks) / GIB
    return f"{need:.0f}, {wire:.1f}" if wire < 10 else f"{need:.0f}, {wire:,.0f}"


def table(shape: Shape) -> str:
    """Lines of Markdown."""
    names = list(ways(shape, 2))
    lines = [f"| GPUs | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for ranks in COUNTS:
        lines.append(f"| {ranks} | {' | '.join(cell(plan) for plan in ways(shape, ranks).values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for one in SHAPES:
        print(f"{one.name}\n\n{table(one)}\n")
