"""SaLoRA against a transcription with an explicit C, a changed base weight and B itself trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn.functional import cross_entropy, linear

from tests import tiny
from tests.unit.trainers.building import deep as build

R, R_S, R_T = 4, 3, 5
SALORA = {"name": "salora", "safety_rank": R_S, "task_rank": R_T}
TARGETS = ("q_proj", "k_proj", "v_proj")
STEPS, RATE, DECAY, NORM = 6, 5e-3, 0.1, 0.2
OPTIONS = {
    "max_steps": STEPS, "optim": "adamw_torch", "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": NORM,
}  # fmt: skip


class Literal(nn.Module):
    """y = W_res x + s C (B (A x))."""

    def __init__(self, weight, v_s, v_t, scaling):
        super().__init__()
        u, sigma, zt = torch.linalg.svd(weight.double(), full_matrices=False)
        root = torch.diag(sigma[:R].sqrt())
        b = v_t @ v_t.T @ u[:, :R] @ root
        a = root @ zt[:R]
        c = torch.eye(len(weight), dtype=torch.float64) - v_s @ v_s.T
        self.s, self.C, self.start = scaling, c.float(), weight
        self.W_res = weight - (scaling * c @ b @ a).float()
        self.A, self.B = nn.Parameter(a.float()), nn.Parameter(b.float())

    def change(self):
        return (self.W_res + self.s * self.C @ self.B @ self.A - self.start).detach()

    def forward(self, x):
        return linear(x, self.W_res) + self.s * linear(linear(linear(x, self.A), self.B), self.C)


def targets(model):
    return {name: module for name, module in model.named_modules() if name.endswith(TARGETS)}


def features(model, rows, rank):
    """Top right singular vectors of X W^T, X row by row without padding, at the reply tokens."""
    inputs = {name: [] for name in targets(model)}
    for ids, labels in rows:
        replies = torch.tensor(labels) != -100
        handles = [
            module.register_forward_hook(lambda _, x, __, name=name, at=replies: inputs[name].append(x[0][0][at]))
            for name, module in targets(model).items()
        ]
        with torch.no_grad():
            model(torch.tensor([ids]))
        for handle in handles:
            handle.remove()
    weights = {name: module.weight.detach() for name, module in targets(model).items()}
    return {
        name: torch.linalg.svd((torch.cat(x) @ weights[name].T).double(), full_matrices=False).Vh[:rank].T
        for name, x in inputs.items()
    }


def literal(trainer, steps):
    """The transcription, trained on these steps, each a list of micro-batches; with V_s."""
    model = tiny.model()
    v_s = features(model, [(row.input_ids, row.labels) for row in trainer.run.data.safe], R_S)
    v_t = features(model, [(row["input_ids"], row["labels"]) for row in trainer.train_dataset], R_T)
    for p in model.parameters():
        p.requires_grad = False
    made = {name: Literal(module.weight, v_s[name], v_t[name], 2.0) for name, module in targets(model).items()}
    for name, module in made.items():
        model.set_submodule(name, module)
    params = [p for module in made.values() for p in (module.A, module.B)]
    optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)
    norms = []
    for micros in steps:
        optimizer.zero_grad()
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micros)
        for batch in micros:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
            (loss / tokens).backward()
        norms.append(float(nn.utils.clip_grad_norm_(params, NORM)))
        optimizer.step()
    return SimpleNamespace(model=model, change={n: m.change() for n, m in made.items()}, v_s=v_s, norms=norms)


def change(trainer):
    """s B A of every module, without the trainer's own bookkeeping."""
    found = {}
    for name, module in trainer.model.get_base_model().named_modules():
        if name.endswith(TARGETS):
            found[name] = module.scaling["default"] * module.lora_B.default.weight @ module.lora_A.default.weight
    return {name: value.detach() for name, value in found.items()}


def recorded(trainer, micros=1):
    seen, choose = [], trainer.defense.choose_batch

    def record(run, inputs, items):
        seen.append(inputs)
        return choose(run, inputs, items)

    trainer.defense.choose_batch = record
    trainer.train()
    return [seen[i : i + micros] for i in range(0, len(seen), micros)]


def prompt_ids():
    return torch.randint(7, 60, (2, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("salora")
    trainer = build(folder, given={"defense": SALORA}, save_strategy="steps", save_steps=4, **OPTIONS)
    steps = recorded(trainer)
    return trainer, literal(trainer, steps), folder


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_training_equals_the_transcription_under_adamw_with_decay_and_clipping(trained):
    trainer, expected, _ = trained
    assert len(expected.norms) == STEPS
    assert min(expected.norms) > NORM  # clipping is at work, so a gradient that is not projected would scale the rest
    found = change(trainer)
    assert found.keys() == expected.change.keys()
    for name, value in expected.change.items():
        assert relative(found[name], value) < 2e-4, name
    logits = trainer.model.eval()(prompt_ids()).logits
    torch.testing.assert_close(logits, expected.model(prompt_ids()).logits, rtol=1e-4, atol=1e-4)


def test_two_micro_batches_equal_the_transcription(tmp_path):
    trainer = build(
        tmp_path, given={"defense": SALORA}, **{**OPTIONS, "gradient_accumulation_steps": 2, "max_steps": 3}
    )
    expected = literal(trainer, recorded(trainer, micros=2))
    found = change(trainer)
    assert max(relative(found[name], value) for name, value in expected.change.items()) < 2e-4


def test_the_change_has_no_component_in_the_safety_directions(trained, tmp_path):
    trainer, expected, _ = trained
    for name, value in change(trainer).items():
        assert float((expected.v_s[name].float().T @ value).norm()) < 2e-6 * float(value.norm()), name
    plain = build(tmp_path, given={"defense": "sft"}, **OPTIONS)
    plain.train()
    shares = [float((expected.v_s[n].float().T @ v).norm() / v.norm()) for n, v in change(plain).items()]
    assert min(shares) > 0.05


def test_arbitrary_updates_do_not_enter_the_safety_directions_either(tmp_path):
    """Whatever stands in the gradients and in the weights, one step later V_s^T B' = 0."""
    trainer = build(tmp_path, given={"defense": SALORA}, **{**OPTIONS, "max_steps": 1})
    draw = torch.Generator().manual_seed(5)
    before_step = trainer.defense.before_step

    def disturb(run):
        with torch.no_grad():
            for p in run.space().params:
                p.add_(torch.randn(p.shape, generator=draw))
        before_step(run)

    trainer.defense.before_step = disturb
    trainer.train()
    v_s = features(tiny.model(), [(row.input_ids, row.labels) for row in trainer.run.data.safe], R_S)
    for name, value in change(trainer).items():
        assert float((v_s[name].float().T @ value).norm()) < 2e-6 * float(value.norm()), name


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_the_start_is_the_given_model_in_training_mode_too(tmp_path, bf16):
    """Dropout 0.5: both halves of the adapter see the same mask and cancel."""
    given = {"defense": SALORA, "peft_config": tiny.lora(0.5)}
    trainer = build(tmp_path, given=given, bf16=bf16)
    base, ids = tiny.model(), prompt_ids()
    assert max(float(b.detach().abs().max()) for n, b in trainer.model.named_parameters() if ".lora_B." in n) > 0.05
    with torch.no_grad(), trainer.accelerator.autocast():
        expected = base(ids).logits
        for model in (trainer.model.eval(), trainer.model.train()):
            torch.testing.assert_close(model(ids).logits, expected, rtol=2e-2 if bf16 else 1e-5, atol=1e-5)
            if bf16:  # not only to bfloat16's rounding: the two halves cancel before anything is rounded
                assert float((model(ids).logits != expected).float().mean()) < 0.2


def test_the_saved_adapter_on_the_original_base_is_the_trained_function(trained, tmp_path):
    trainer, _, folder = trained
    trainer.save_model(str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = trainer.model.eval()(prompt_ids()).logits
        assert float((expected - tiny.model()(prompt_ids()).logits).abs().max()) > 0.05
        loaded = PeftModel.from_pretrained(tiny.model(), tmp_path / "adapter")
        assert loaded.peft_config["default"].r == 2 * R
        torch.testing.assert_close(loaded(prompt_ids()).logits, expected)
        folded = loaded.merge_and_unload()
        torch.testing.assert_close(folded(prompt_ids()).logits, expected, rtol=1e-5, atol=1e-5)
        # A checkpoint in the middle is an adapter of the same kind: four steps, not six.
        middle = PeftModel.from_pretrained(tiny.model(), folder / "run" / "checkpoint-4")(prompt_ids()).logits
    again = build(tmp_path / "four", given={"defense": SALORA}, **{**OPTIONS, "max_steps": 4})
    again.train()
    torch.testing.assert_close(middle, again.model.eval()(prompt_ids()).logits)
