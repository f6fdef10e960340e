"""A pass leaves the model as it found it, checkpoints where it should, and drops inputs of task tokens alone."""

from __future__ import annotations

import pytest
import torch
import transformers as t
from tests import hybrid
from tests import tiny as words
from tests.unit.fused.comparing import adapted, apart, encoded, own, packed, passes, seeds, tiny

from holdfast.fused.packed_rows import CURRENT, encoded_rows
from holdfast.scoring.completion import hidden_states

QKV = ("q_proj", "k_proj", "v_proj")
TASK, SIDE = encoded_rows(encoded((9, 4, 6))), encoded_rows(encoded((5, 8), seed=1))


def model(dropout: float = 0.0, *, checkpointing: bool | None = None, kind: str = "llama"):
    base = words.model() if kind == "llama" else hybrid.model()
    made = adapted(base, QKV if kind == "llama" else hybrid.ADAPTED, lora_dropout=dropout)
    if checkpointing is not None:
        made.get_base_model().gradient_checkpointing_enable({"use_reentrant": checkpointing})
        made.enable_input_require_grads()
    return made.train()


def snapshot(made):
    """Everything that a pass could leave behind."""
    return [
        (
            name, module.training, dict(module._forward_hooks), dict(module._forward_pre_hooks),
            {k: id(v) for k, v in vars(module).items() if k not in ("_modules", "_parameters", "_buffers")},
            {n: (id(p), p.requires_grad, p.grad) for n, p in module._parameters.items() if p is not None},
        )
        for name, module in made.named_modules()
    ]  # fmt: skip


def flags(made):
    # `training` is written to and back, and hooks are looked at by themselves.
    gone = ("training", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    return [(n, tr, h, p, {k: v for k, v in d.items() if k not in gone}, q) for n, tr, h, p, d, q in snapshot(made)]


class BrokenError(Exception):
    pass


def spoil(made, where: str) -> None:
    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                raise BrokenError
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise BrokenError

    layers = made.get_base_model().model.layers
    layers[1].mlp.register_forward_hook(lambda _m, _a, out: Raise.apply(out))


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("where", [None, "forward", "backward"])
def test_a_pass_leaves_nothing_behind(kind, checkpointing, where):
    made = model(0.3, checkpointing=checkpointing, kind=kind)
    made.get_base_model().model.layers[0].mlp.eval()  # as somebody may have left it
    if where is not None:
        spoil(made, where)
    run = passes(made)
    config = made.get_base_model().config
    before, text = flags(made), config.to_json_string() + str(config._attn_implementation)
    if where is None:
        packed(run, [TASK, SIDE])
        run.states([SIDE])
        run.states([SIDE], adapters=False)
    else:
        with pytest.raises(BrokenError):
            packed(run, [TASK, SIDE])
    assert flags(made) == before
    assert config.to_json_string() + str(config._attn_implementation) == text
    assert CURRENT.layout is None
    assert CURRENT.segment is None
    assert not CURRENT.dropout


def test_a_forward_that_a_mixer_brings_along_is_used_and_kept():
    made = model(kind="hybrid")
    mixer = made.get_base_model().model.layers[0].linear_attn
    plain = type(mixer).forward
    calls = []

    def forward(*args, **kwargs):
        calls.append(1)
        return plain(mixer, *args, **kwargs)

    mixer.forward = forward
    run = passes(made)
    packed(run, [TASK, SIDE])
    assert calls
    assert mixer.__dict__["forward"] is forward


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_are_run_again_in_the_backward_only_under_checkpointing(reentrant):
    expected = packed(passes(model()), [TASK, SIDE])
    for made, times in ((model(), 1), (model(checkpointing=reentrant), 2)):
        calls = []
        mlp = made.get_base_model().model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        found = packed(passes(made), [TASK, SIDE])
        assert len(calls) == times
        assert torch.equal(found[0], expected[0])
        for a, b in zip(found[1], expected[1], strict=True):
            assert apart(a, b) < 1e-6


def test_a_parameter_that_is_replaced_is_followed():
    """A checkpoint loaded by assignment: the pass must read the new tensors."""
    made = model()
    run = passes(made)
    packed(run, [TASK, SIDE])
    layer = run.body.adapter.layers[0].module
    layer.lora_B["default"].weight = torch.nn.Parameter(torch.randn_like(layer.lora_B["default"].weight))
    (h, g), (h_0, g_0) = packed(run, [TASK, SIDE]), own(made, run, [TASK, SIDE])
    assert apart(h, h_0) < 1e-6
    assert all(apart(a, b) < 1e-5 for a, b in zip(g, g_0, strict=True))


# -- the adapter's dropout ------------------------------------------------------------------------------------------


def dropped(made, row):
    """By PEFT itself: everything in evaluation mode but LoRA's dropout."""
    made.eval()
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    hidden = hidden_states(made, {"input_ids": torch.tensor([row[0]]), "attention_mask": torch.ones(1, len(row[0]))})[0]
    parameters = passes(made).body.adapter.parameters
    found = torch.autograd.grad(hidden, parameters, seeds(*hidden.shape))
    return torch.cat([g.flatten() for g in found])


def test_the_tasks_dropout_is_pefts():
    theirs, ours = model(0.5), passes(model(0.5))
    torch.manual_seed(5)
    expected = dropped(theirs, TASK[0])
    torch.manual_seed(5)
    found = packed(ours, [TASK[:1], []])[1][0]
    torch.manual_seed(6)
    other = packed(ours, [TASK[:1], []])[1][0]
    assert apart(found, expected) < 1e-6
    assert apart(other, expected) > 0.1


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_dropout_falls_on_task_tokens_alone(kind, checkpointing):
    clean = packed(passes(model(kind=kind)), [TASK, SIDE])
    run = passes(model(0.5, checkpointing=checkpointing, kind=kind))
    torch.manual_seed(0)
    first, second = packed(run, [TASK, SIDE]), packed(run, [TASK, SIDE])
    n = sum(len(ids) for ids, _ in TASK)
    for states, gradients in (first, second):
        assert apart(states[n:], clean[0][n:]) < 1e-6
        assert apart(gradients[1], clean[1][1]) < 1e-6
        assert apart(gradients[0], clean[1][0]) > 0.05
    assert apart(first[1][0], second[1][0]) > 0.05  # the random state moves on


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_checkpointing_replays_the_masks(kind):
    found = []
    for checkpointing in (None, False, True):
        run = passes(model(0.5, checkpointing=checkpointing, kind=kind))
        torch.manual_seed(3)
        found.append(packed(run, [TASK, SIDE])[1][0])
    assert apart(found[1], found[0]) < 1e-6
    assert apart(found[2], found[0]) < 1e-6


def test_what_is_measured_has_no_dropout_and_draws_nothing():
    made = model(0.5)
    run, clean = passes(made), passes(model())
    state = torch.random.get_rng_state()
    assert apart(run.states([SIDE]), clean.states([SIDE])) < 1e-6
    assert torch.equal(torch.random.get_rng_state(), state)


def test_not_a_number_in_one_row_stays_in_it():
    made = model()
    made.get_base_model().model.embed_tokens.weight.data[63] = float("nan")
    spoilt = ((63, 5, 6, 7), (63, 5, 6, 7))
    rows = [row for row in [*TASK, *SIDE] if 63 not in row[0]]
    hidden = passes(made).states([[spoilt], rows])
    assert not hidden[:4].isfinite().any()
    assert hidden[4:].isfinite().all()
    hybrid_ = tiny(t.Lfm2Config, target=QKV, layer_types=["conv", "full_attention"])
    hybrid_.get_base_model().model.embed_tokens.weight.data[63] = float("nan")
    assert passes(hybrid_).states([[spoilt], rows])[4:].isfinite().all()
