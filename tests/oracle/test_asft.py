"""AsFT against its formula written out: explicit d_out x d_out matrices, B A, autograd and a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import get_peft_model

from holdfast.models.alignment_shift import FactoredShift, alignment_shift
from holdfast.models.lora_layers import lora_layers
from holdfast_lab.building_blocks.alignment_projector import Projector, projectors
from holdfast_lab.defenses.asft import Group, grouped
from tests import aligned, hybrid, tiny
from tests.contracts.defense_cases import unaligned_of
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

LAM = 4.0
SGD = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "optim": "sgd",
    "learning_rate": 0.2, "max_grad_norm": 0.0, "weight_decay": 0.0,
}  # fmt: skip


NO_SAFETY = {"safety_dataset": None, "constraint": None}


def literal_c(v: torch.Tensor, projector: str, rank: int) -> torch.Tensor:
    """C of one module as a d_out x d_out matrix."""
    if projector == "paper":
        return v @ v.T / torch.sqrt((v * v).sum())
    u, _, _ = torch.linalg.svd(v)
    return u[:, :rank] @ u[:, :rank].T


def literal_penalty(pairs: list[tuple[torch.Tensor, torch.Tensor]], cs: list[torch.Tensor]) -> torch.Tensor:
    """sum_l |(I - C_l) B_l A_l|_F^2."""
    total = 0.0
    for (a, b), c in zip(pairs, cs, strict=True):
        total = total + ((torch.eye(len(c), dtype=c.dtype) - c) @ b @ a).square().sum()  # type: ignore[assignment]
    return total  # type: ignore[return-value]


def literal_run(model, batches: list[list[dict]], unaligned: dict, lam: float, projector: str, rank: int) -> dict:
    """Gradient descent on the token-mean loss of each step's rows plus lam times the penalty."""
    adapted = [n for n, _ in model.named_modules() if n.endswith(("q_proj", "k_proj", "v_proj", "in_proj_qkv"))]
    parameters = dict(model.named_parameters())
    pairs = [(parameters[f"{n}.lora_A.default.weight"], parameters[f"{n}.lora_B.default.weight"]) for n in adapted]
    cs = []
    for name in adapted:
        before = unaligned[name.removeprefix("base_model.model.") + ".weight"]
        cs.append(literal_c(parameters[f"{name}.base_layer.weight"].detach() - before, projector, rank))
    for step in batches:
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step)
        loss = 0.0
        for batch in step:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            loss = loss + torch.nn.functional.cross_entropy(  # type: ignore[assignment]
                logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum", ignore_index=-100
            )
        loss = loss / tokens + lam * literal_penalty(pairs, cs)  # type: ignore[assignment]
        trained = [p for pair in pairs for p in pair]
        with torch.no_grad():
            for p, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):  # type: ignore[call-overload]
                p.sub_(SGD["learning_rate"] * gradient)
    return {name: p.detach().clone() for name, p in parameters.items() if p.requires_grad}


def trained(folder, model, unaligned, options, **given):
    """A finished run, its model at the start, and the rows of every step."""
    trainer = build(
        folder,
        given={
            **NO_SAFETY, "model": model, "unaligned": unaligned, "defense": {"name": "asft", **options}, **given
        },
        **SGD,
    )  # fmt: skip
    start, seen, inner = copy.deepcopy(trainer.model), [], trainer.compute_loss

    def recorded(model, inputs, *args, **kwargs):
        seen.append({key: inputs[key] for key in ("input_ids", "attention_mask", "labels")})
        return inner(model, inputs, *args, **kwargs)

    trainer.compute_loss = recorded
    trainer.train()
    assert len(seen) == 8
    for module in start.modules():
        module.__dict__.pop("forward", None)  # TRL's patch, which would run the original's layers
    return trainer, start, [seen[i : i + 2] for i in range(0, len(seen), 2)]


@pytest.mark.parametrize("form", ["adapter", "model"])
@pytest.mark.parametrize("projector", ["paper", "orthogonal"])
def test_four_steps_of_the_trainer(tmp_path, projector, form):
    folder = aligned.adapter(tmp_path / "alignment")
    rank = 2 if form == "model" and projector == "orthogonal" else None
    options = {"lam": LAM, "projector": projector, "rank": rank}
    before = folder if form == "adapter" else tiny.model()
    trainer, start, batches = trained(tmp_path, aligned.merged(folder), before, options)
    unaligned = tiny.model().state_dict()
    expected = literal_run(copy.deepcopy(start), batches, unaligned, LAM, projector, rank or 3)
    plain = literal_run(start, batches, unaligned, 0.0, projector, 3)
    found = weights(trainer)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)
    assert max(float((expected[name] - plain[name]).abs().max()) for name in plain) > 1e-3


def test_hybrid_attention_with_a_hand_shifted_base(tmp_path):
    """in_proj_qkv of the linear-attention blocks and the doubled q_proj take part by name."""
    model = hybrid.model(linear=3)
    before = unaligned_of(model)
    options = {"lam": LAM}
    trainer, start, batches = trained(tmp_path, model, before, options, peft_config=hybrid.lora())
    expected = literal_run(start, batches, before.state_dict(), LAM, "paper", 0)
    for name, weight in weights(trainer).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=2e-6)
    assert sum(".linear_attn.in_proj_qkv" in name for name in expected) == 6


def test_lambda_zero_is_sft_bit_for_bit(tmp_path):
    folder = aligned.adapter(tmp_path / "alignment")
    trainer, _, _ = trained(tmp_path / "a", aligned.merged(folder), folder, {"lam": 0.0})
    sft = build(tmp_path / "b", given={**NO_SAFETY, "model": aligned.merged(folder), "defense": "sft"}, **SGD)
    sft.train()
    assert same(weights(trainer), weights(sft))


# -- pure tensors, float64 ---------------------------------------------------------------------------------------------


def random_group(n: int, d_out: int, d_in: int, r: int, k: int, *, seed: int, square: bool = False) -> Group:
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    factor = numbers(n, d_out, k) / (d_out * k) ** 0.5
    matrix = factor @ factor.mT if square else factor
    a = [torch.nn.Parameter(numbers(r, d_in)) for _ in range(n)]
    b = [torch.nn.Parameter(numbers(d_out, r)) for _ in range(n)]
    return Group(a, b, Projector(matrix, square))


def literal_of(group: Group) -> torch.Tensor:
    stack = group.c.matrix
    cs = list(stack if group.c.square else stack @ stack.mT)
    return literal_penalty(list(zip(group.A, group.B, strict=True)), cs)


@pytest.mark.parametrize(
    ("n", "d_out", "d_in", "r", "k", "square"),
    [
        pytest.param(3, 12, 7, 4, 2, False, id="factored"),
        pytest.param(2, 6, 9, 3, 6, True, id="square"),
        pytest.param(1, 4, 10, 4, 1, False, id="d_out-is-r"),
        pytest.param(2, 5, 6, 2, 0, False, id="no-shift"),
    ],
)
def test_value_and_gradient_equal_autograd_of_the_formula(n, d_out, d_in, r, k, square):
    group = random_group(n, d_out, d_in, r, max(k, 1), seed=n, square=square)
    if k == 0:
        group = Group(group.A, group.B, Projector(group.c.matrix[:, :, :0]))
    (penalty, plain), d_a, d_b = group.penalty()
    literal = literal_of(group)
    gradients = torch.autograd.grad(literal, [*group.A, *group.B])
    torch.testing.assert_close(penalty, literal.detach(), rtol=1e-11, atol=0)
    both = sum((b @ a).square().sum() for a, b in zip(group.A, group.B, strict=True))
    torch.testing.assert_close(plain, both.detach(), rtol=1e-11, atol=0)
    for found, expected in zip([*d_a, *d_b], gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("square", [True, False], ids=["square", "factored"])
def test_at_the_start_penalty_and_gradients_are_zero(square):
    group = random_group(2, 8, 8, 3, 2, seed=1, square=square)
    for b in group.B:
        b.data.zero_()
    (penalty, plain), d_a, d_b = group.penalty()
    assert penalty == plain == 0
    assert not d_a.any()
    assert not d_b.any()


def adapted(folder) -> tuple[list, dict]:
    """Modules of a float64 model with a random trained adapter, and the shift of its alignment adapter."""
    model = get_peft_model(aligned.merged(aligned.adapter(folder)).double(), tiny.lora())
    layers = lora_layers(model, defense="test")
    draw = torch.Generator().manual_seed(3)
    for layer in layers:
        layer.B.data = torch.randn(layer.B.shape, generator=draw, dtype=torch.float64)
        layer.A.data = layer.A.data.double()
    return layers, alignment_shift(layers, folder)


def total(groups: list[Group]) -> float:
    return sum(float(group.penalty()[0][0]) for group in groups)


def test_order_of_modules_does_not_matter(tmp_path):
    layers, shifts = adapted(tmp_path)
    found = projectors(layers, shifts, "paper")
    there, back = total(grouped(layers, found)), total(grouped(layers[::-1], found))
    assert there == pytest.approx(back, rel=1e-12)
    keys, _, values = (layer.name for layer in layers[:3])  # of one shape, with a C each
    mixed = {**found, keys: found[values], values: found[keys]}
    assert total(grouped(layers, mixed)) != pytest.approx(there, rel=1e-6)  # the name decides which C a module gets


def test_orthogonal_leaves_the_subspace_of_alignment_free(tmp_path):
    layers, shifts = adapted(tmp_path)
    for layer in layers:
        mix = torch.randn(3, layer.B.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        layer.B.data = shifts[layer.name].left.double() @ mix
    free = total(grouped(layers, projectors(layers, shifts, "orthogonal")))
    shrunk = total(grouped(layers, projectors(layers, shifts, "paper")))
    assert free < 1e-12
    assert shrunk > 1


@pytest.mark.parametrize(("k", "sigma"), [(2, 0.1), (4, 3.0)], ids=["two", "four"])
def test_eigenvalues_of_c_for_equal_singular_values(k, sigma):
    """sigma / sqrt(k) = |V|_F / k: C is a projector only by accident."""
    d = 10
    basis, _ = torch.linalg.qr(torch.randn(d, k, dtype=torch.float64, generator=torch.Generator().manual_seed(k)))
    other, _ = torch.linalg.qr(torch.randn(8, k, dtype=torch.float64, generator=torch.Generator().manual_seed(9)))
    layer = type("Layer", (), {"name": "m", "B": torch.zeros(d, 2, dtype=torch.float64)})()
    c = projectors([layer], {"m": FactoredShift(sigma * basis, other.T)}, "paper")["m"]
    values = torch.linalg.eigvalsh(c.apply(torch.eye(d, dtype=torch.float64)))
    expected = torch.zeros(d, dtype=torch.float64)
    expected[-k:] = sigma / k**0.5
    torch.testing.assert_close(values, expected, rtol=1e-7, atol=1e-9)
    assert float(values[-1]) == pytest.approx(float((sigma * basis @ other.T).norm()) / k)
