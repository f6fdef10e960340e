"""On a GPU: the fused step kernel by kernel and recorded, in float32 and in bfloat16, against two passes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.constraint import gradients
from holdfast.constraint.gradients import ParameterSpace
from holdfast.fused import delta_rule
from holdfast.fused.body import Body, EagerPasses
from holdfast.fused.grouped_lora import GroupedAdapter
from holdfast.fused.packed_rows import encoded_rows
from holdfast.fused.recorded import RecordedPasses, rounded
from holdfast.fused.support import other_mixers, plain_layers
from holdfast.training.probe import looked_at
from tests import hybrid, tiny
from tests.oracle.test_fused_step import ALL_ACTIVE, Watch, close
from tests.unit.fused.comparing import adapted, encoded
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS = {"per_device_train_batch_size": 4, "safety_batch_size": 4, "use_cpu": False, "optim": "sgd"}


def watched(
    folder: Any, *, dtype: torch.dtype, model: Any = tiny.model, lora: Any = tiny.lora, **options: Any
) -> Watch:
    limit = hf.ChanceConstraint(**ALL_ACTIVE, unit="nll_token", allow_tau_below_noise=True)
    made = model(dtype=options.pop("like", dtype)).to(dtype)
    given = {"model": made, "peft_config": lora(), "constraint": limit}
    settings = {**ROWS, "learning_rate": 0.01, "bf16": dtype == torch.bfloat16, "max_steps": 4, **options}
    trainer = build(folder, given=given, **settings)
    for p in trainer.model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    watch = Watch(trainer)
    trainer.train()
    assert trainer.run.engine.fused == (options["step"] == "fused")
    if options.get("step_graphs") == "on":
        assert trainer.run.engine.joint.passes.recording  # type: ignore[attr-defined]
        assert trainer.run.engine.joint.passes._recordings  # type: ignore[attr-defined]
    watch.weights = weights(trainer)  # type: ignore[attr-defined]
    return watch


def apart(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> float:
    """Of the first step, where both are at the same weights."""
    x, y = (torch.cat([t.flatten() for t in v[0]]).double() for v in (a, b))
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_float32_gradients_are_those_of_two_passes(tmp_path, graphs, checkpointing):
    torch.backends.cuda.matmul.allow_tf32 = False
    common = {"dtype": torch.float32, "gradient_checkpointing": checkpointing, "bf16": False, "tf32": False}
    two = watched(tmp_path / "two", step="two_pass", **common)
    fused = watched(tmp_path / "fused", step="fused", step_graphs=graphs, **common)
    close(fused.task, two.task, 1e-6)
    close(fused.side, two.side, 1e-6)


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_bfloat16_gradients_are_within_the_noise_of_two_passes(tmp_path, monkeypatch, graphs, checkpointing, kind):
    calls: list[Any] = []
    rule = delta_rule.gated_delta_rule
    monkeypatch.setattr(delta_rule, "gated_delta_rule", lambda *args: calls.append(len(args)) or rule(*args))
    common = {"dtype": torch.bfloat16, "gradient_checkpointing": checkpointing}
    if kind == "hybrid":
        common |= {"model": hybrid.model, "lora": hybrid.lora}
    two = watched(tmp_path / "two", step="two_pass", **common)
    # The same rows in other batches: what the reference itself moves by.
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "safety_micro_batch_size": 1}
    again = watched(tmp_path / "again", step="two_pass", **common, **split)
    fused = watched(tmp_path / "fused", step="fused", step_graphs=graphs, **common)
    assert bool(calls) == (kind == "hybrid")
    # From the same weights in float32. TRL's head rounds the task's logits to bfloat16 where ours does not.
    exact = watched(tmp_path / "exact", step="two_pass", **{**common, "dtype": torch.float32, "like": torch.bfloat16})
    for name in ("task", "side"):
        own, reference, other, true = (getattr(w, name) for w in (fused, two, again, exact))
        noise = max(apart(other, reference), apart(reference, true))
        assert 0 < noise < 0.1
        assert apart(own, reference) <= 1.5 * noise
        assert apart(own, true) <= 1.2 * apart(reference, true)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_float32_base_under_autocast(tmp_path, graphs):
    common = {"dtype": torch.float32, "bf16": True}
    two = watched(tmp_path / "two", step="two_pass", **common)
    fused = watched(tmp_path / "fused", step="fused", step_graphs=graphs, **common)
    exact = watched(tmp_path / "exact", step="two_pass", **{**common, "bf16": False, "tf32": False})
    for name in ("task", "side"):
        own, reference, true = (getattr(w, name) for w in (fused, two, exact))
        assert 0 < apart(reference, true) < 0.1
        assert apart(own, true) <= 1.2 * apart(reference, true)


def test_a_recorded_run_repeats_itself_bit_for_bit(tmp_path):
    common = {"dtype": torch.bfloat16, "step": "fused", "step_graphs": "on"}
    one, two = (watched(tmp_path / name, **common) for name in ("one", "two"))
    assert all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)  # type: ignore[attr-defined]


def test_memory_stays_flat(tmp_path):
    marks = []

    class Mark(hf.SafeSFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            found = super().training_step(*args, **kwargs)
            marks.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            return found

    from tests.unit.trainers import building

    args = building.arguments(
        tmp_path,
        **{**ROWS, "max_steps": 1000, "bf16": True, "step": "fused", "step_graphs": "on", "optim": "adamw_torch"},
    )
    trainer = Mark(
        tiny.model(dtype=torch.bfloat16), args, processing_class=tiny.tokenizer(), train_dataset=building.task(),
        safety_dataset=building.safety(), peft_config=tiny.lora(),
        constraint=hf.ChanceConstraint(**ALL_ACTIVE, unit="nll_token", allow_tau_below_noise=True),
    )  # fmt: skip
    for p in trainer.model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    trainer.train()
    assert len(marks) == 1000
    assert max(a for a, _ in marks[500:]) <= max(a for a, _ in marks[100:500])
    assert marks[-1][1] <= marks[499][1]


@pytest.mark.parametrize("name", ["sft", "mix", "kl", "safegrad", "lisa", "primal_dual"])
def test_recorded_passes_leave_other_defenses_as_they_are(tmp_path, name):
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {}
    for step in ("two_pass", "fused"):
        given = {"defense": name, "constraint": hf.ChanceConstraint(tau=1.0, unit="nll_token")}
        graphs = "on" if step == "fused" else "auto"
        options = {**ROWS, "learning_rate": 0.01, "bf16": False, "tf32": False, "step": step, "step_graphs": graphs}
        trainer = build(tmp_path / step, given=given, **options)
        trainer.train()
        assert trainer.run.engine.fused == (step == "fused")
        assert step == "two_pass" or trainer.run.engine.joint.passes._recordings  # type: ignore[attr-defined]
        found[step] = weights(trainer)
    for key, value in found["fused"].items():
        torch.testing.assert_close(value, found["two_pass"][key], rtol=1e-4, atol=1e-6)


def test_recorded_dropout_draws_anew_at_every_step_and_repeats_with_the_seed(tmp_path):
    def run(name: str, dropout: float) -> Watch:
        # No step moves the weights: the same rows differ by their masks alone.
        data = tiny.dataset(4, seed=1, start="w1")
        given = {
            "peft_config": tiny.lora(dropout),
            "constraint": hf.ChanceConstraint(tau=1.0, unit="nll_token"),
            "train_dataset": data,
        }
        options = {**ROWS, "learning_rate": 0.0, "step": "fused", "step_graphs": "on", "max_steps": 3}
        trainer = build(tmp_path / name, given=given, **options)
        watch = Watch(trainer)
        trainer.train()
        assert trainer.run.engine.joint.passes._recordings  # type: ignore[attr-defined]
        return watch

    one, two, without = run("one", 0.3), run("two", 0.3), run("without", 0.0)
    for own, again in zip(one.task, two.task, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(own, again, strict=True))
    assert apart([one.task[1]], [one.task[0]]) > 1e-3
    assert apart([without.task[1]], [without.task[0]]) < 1e-4


def test_a_filling_row_longer_than_every_other_reaches_no_gradient():
    """In a hybrid the recorded attention is told a bound; what lies beyond it is memory that nobody has written."""
    rows = encoded([10] * 82)
    groups = [encoded_rows(rows[:41]), encoded_rows(rows[41:])]
    fill = rounded(groups, padded=True)
    assert fill.tokens - 820 > max(fill.widths)
    made = adapted(hybrid.model(dtype=torch.bfloat16), hybrid.ADAPTED).cuda()
    layers, mixers = plain_layers(made), other_mixers(made)
    body = Body(made, GroupedAdapter(layers, 2), mixers, device=torch.device("cuda"), precision=nullcontext)
    eager, recorded = EagerPasses(body), RecordedPasses(body)

    def real_tokens(hidden: torch.Tensor) -> torch.Tensor:
        gradient = torch.zeros_like(hidden)  # as losses give it: filling tokens are scored nowhere
        gradient[:820] = 1 / 820
        return gradient

    def found(passes: Any) -> torch.Tensor:
        gradients = passes.gradients(groups, real_tokens)
        return torch.cat([g.flatten() for group in gradients for g in group]).double()

    expected = found(eager)
    spoilt = torch.full((2**28,), float("nan"), device="cuda")
    del spoilt  # what is allocated next is full of NaN
    for _ in range(3):
        assert (found(recorded) - expected).norm() <= 0.05 * expected.norm()
    assert recorded.recording


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_capture_that_fails_leaves_stream_allocator_and_generator_to_the_others(where):
    """A look at a value makes the driver give a capture up, which torch then ends half-way."""

    def look(_module: Any, _arguments: Any, out: torch.Tensor) -> torch.Tensor | None:
        if where == "forward":
            return out + 0.0 * out.sum().item()
        out.register_hook(lambda g: g + 0.0 * g.sum().item())
        return None

    made = adapted(tiny.model(), ("q_proj", "k_proj", "v_proj"), lora_dropout=0.3).cuda().train()
    made.get_base_model().model.norm.register_forward_hook(look)
    layers = plain_layers(made)
    body = Body(made, GroupedAdapter(layers, 1), [], device=torch.device("cuda"), precision=nullcontext)
    passes, stream = RecordedPasses(body), torch.cuda.current_stream()
    for _ in range(2):  # both draw masks
        found = passes.gradients([encoded_rows(encoded([5, 9]))], torch.ones_like)
        assert all(bool(torch.isfinite(g).all()) for g in found[0])
    assert not passes.recording
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    large = torch.empty(2**27, device="cuda", dtype=torch.uint8)
    del large
    torch.cuda.empty_cache()  # which frees nothing while a capture counts as under way
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize("unit", ["kl_token", "nll_token"])
def test_a_look_between_recorded_steps_is_what_the_monitor_measures(tmp_path, unit):
    """It is not recorded, and leaves the recordings of the steps as they are."""
    constraint = hf.ChanceConstraint(tau=1e-3, beta=1e3, unit=unit, allow_infeasible_start=True)
    settings = {**ROWS, "learning_rate": 0.05, "bf16": False, "tf32": False, "max_steps": 4, "step": "fused"}
    trainer = build(tmp_path, given={"constraint": constraint}, **settings, step_graphs="on")
    trainer.train()
    passes = trainer.run.engine.joint.passes  # type: ignore[attr-defined]
    before, places = dict(passes._recordings), [3, 0, 5, 4, 1]
    found = looked_at(trainer.run, "safety", places)
    expected = trainer.degradations("safety", "constraint")[places]
    assert expected.abs().max() > 1e-3, "training moved it"
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)
    assert passes._recordings == before


def test_inner_products_are_off_by_the_rounding_of_a_block_and_exact_ones_are_not(monkeypatch):
    monkeypatch.setattr(gradients, "BLOCK", 100_000)
    draw = torch.Generator(device="cuda").manual_seed(0)
    a, b = ([torch.randn(450_001, generator=draw, device="cuda")] for _ in range(2))
    space = ParameterSpace([torch.nn.Parameter(a[0].clone())])
    size = float(a[0].double().norm() * b[0].double().norm())
    for x, y in ((a, b), (a, a)):
        expected = float(x[0].double() @ y[0].double())
        assert abs(space.dots([(x, y)])[0] - expected) < 1e-6 * size
        assert abs(space.dots([(x, y)], exact=True)[0] - expected) < 1e-12 * size
