"""Lisa against a literal transcription: a status, two counters, two copies of the weights, the term in the loss."""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model

from holdfast.core.event_log import read
from holdfast.core.seeding import generator
from holdfast.data.encode import collate
from holdfast_lab.defenses.lisa import Phases
from tests import tiny
from tests.unit.trainers.building import deep as build
from tests.unit.trainers.building import same, weights

RATE = 0.1  # at 0.5 the tiny model's path is chaotic: rounding grows tenfold every three steps
PLAIN = {"optim": "sgd", "learning_rate": RATE, "max_grad_norm": 0.0, "weight_decay": 0.0}
Batch = dict[str, torch.Tensor]


def literal_phases(align: int, finetune: int, steps: int) -> list[tuple[str, bool]]:
    """The authors' status and clock: (status, whether it was switched to) of every step."""
    status, clock, found = "align" if align else "finetune", 0, []
    for t in range(steps):
        switched = False
        if status == "align":
            if finetune and t > 0 and clock == align:
                status, clock, switched = "finetune", 0, True
        elif align and t > 0 and clock == finetune:
            status, clock, switched = "align", 0, True
        found.append((status, switched))
        clock += 1
    return found


def test_phases_of_two_and_three_in_twelve_steps():
    a, f = "align", "finetune"
    assert [Phases(2, 3).at(t) for t in range(12)] == [a, a, f, f, f, a, a, f, f, f, a, a]
    assert [t for t in range(12) if Phases(2, 3).begins(t)] == [0, 2, 5, 7, 10]


def test_phases_of_the_paper():
    """1000 rows, batch 10, 20 epochs: 2000 steps, of which 1800 see the task."""
    found = [Phases(100, 900).at(t) for t in range(2000)]
    assert found == (["align"] * 100 + ["finetune"] * 900) * 2


def test_phases_are_those_of_the_state_machine():
    for align in range(6):
        for finetune in range(6):
            if align + finetune == 0:
                continue
            phases, before = Phases(align, finetune), 0
            for t, (status, switched) in enumerate(literal_phases(align, finetune, 40)):
                assert phases.at(t) == status
                assert phases.begins(t) == (switched or t == 0)
                assert phases.align_steps(t) == before
                before += status == "align"


def observed(folder, defense: Any, rows: int = 12, **options: Any):
    """A trainer, the task micro-batches that reached each of its steps, and the weights after each."""
    given = {"defense": defense, "train_dataset": tiny.dataset(rows, seed=1, start="w1")}
    trainer = build(folder, given=given, **{**PLAIN, **options})
    task: list[list[Batch]] = []
    path: list[dict[str, torch.Tensor]] = []
    step = trainer.training_step

    def noted(model, inputs, *args, **kwargs):
        while len(task) <= trainer.state.global_step:
            task.append([])
        task[-1].append({name: inputs[name].clone() for name in ("input_ids", "attention_mask", "labels")})
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = noted
    trainer.step_listeners.append(lambda _: path.append(weights(trainer)))
    return trainer, task, path


def token_mean(model: Any, batches: list[Batch]) -> torch.Tensor:
    """Cross-entropy over all scored tokens of all batches, divided by their number."""
    total, tokens = torch.zeros(()), 0
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        total = total + torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        tokens += int((labels != -100).sum())
    return total / tokens


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def guide_batches(trainer: Any, size: int):
    """A sampler without replacement that begins again when it is exhausted: the authors' loader of safe pairs."""
    safe, epoch, left = trainer.run.data.safe, 0, []
    while True:
        drawn = []
        while len(drawn) < size:
            if not left:
                order = generator(trainer.args.stream_seed, "guide", epoch).permutation(len(safe)).tolist()
                left, epoch = [safe[i] for i in order], epoch + 1
            drawn.append(left.pop(0))
        yield drawn


def transcription(trainer: Any, start: dict, task: list[list[Batch]], *, align: int, finetune: int, rho: float):
    """Weights after each step of SGD."""
    model = get_peft_model(tiny.model(), tiny.lora())
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(start[name])
    anchors = {phase: {n: p.detach().clone() for n, p in params.items()} for phase in ("align", "finetune")}
    guide = guide_batches(trainer, trainer.run.data.task_batch)
    total, path = len(task), []
    for t, (status, switched) in enumerate(literal_phases(align, finetune, total)):
        if switched:
            ended = "align" if status == "finetune" else "finetune"
            anchors[ended] = {n: p.detach().clone() for n, p in params.items()}
        batches = task[t]
        if status == "align":
            drawn = next(guide)[: trainer.args.per_device_train_batch_size * len(task[t])]
            batches = [collate(drawn, pad_token_id=0)]
        loss = token_mean(model, batches)
        if t > 0.1 * total:
            other = anchors["finetune" if status == "align" else "align"]
            loss = loss + sum(rho / 2 * (p - other[n]).square().sum() for n, p in params.items())
        for p, g in zip(params.values(), torch.autograd.grad(loss, list(params.values())), strict=True):
            p.data -= RATE * g
        path.append({n: p.detach().clone() for n, p in params.items()})
    return path


def test_trajectory_is_the_transcription(tmp_path):
    """Ten rows in batches of two: every third step, the last of its epoch, has one micro-batch instead of two."""
    settings = {"align": 2, "finetune": 3, "rho": 2.0}
    defense = {"name": "lisa", "align_steps": 2, "finetune_steps": 3, "rho": 2.0}
    options = {"max_steps": 12, "gradient_accumulation_steps": 2}
    trainer, task, path = observed(tmp_path, defense, 10, **options)
    start = weights(trainer)
    trainer.train()
    assert [len(micros) for micros in task] == [2, 2, 1] * 4
    expected = transcription(trainer, start, task, **settings)
    for found, wanted in zip(path, expected, strict=True):
        assert furthest(found, wanted) < 1e-6
    # What the comparison can see: the term, and the safe pairs, move the result by far more.
    for other in ({**settings, "rho": 0.0}, {**settings, "align": 1}):
        assert furthest(path[-1], transcription(trainer, start, task, **other)[-1]) > 1e-3


def test_without_fine_tuning_and_rho_it_is_sft_on_the_safe_pairs(tmp_path):
    """Bit for bit, with two micro-batches a step: the loss of a guide batch is divided as that of a task batch."""
    options = {"max_steps": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch", "learning_rate": 5e-3}
    defense = {"name": "lisa", "align_steps": 3, "finetune_steps": 0, "rho": 0.0}
    lisa, _, _ = observed(tmp_path / "lisa", defense, **options)
    lisa.train()
    draws = guide_batches(lisa, lisa.run.data.task_batch)
    by_id = {e.id: {"prompt": e.prompt, "completion": e.completion} for e in lisa.safety["safety"].split.constraint}
    rows = [by_id[row.id] for _ in range(4) for row in next(draws)]
    given = {
        "defense": "sft",
        "safety_dataset": None,
        "constraint": None,
        "train_dataset": tiny.Dataset.from_list(rows),
    }
    sft = build(tmp_path / "sft", given=given, train_sampling_strategy="sequential", **{**PLAIN, **options})
    sft.train()
    assert same(weights(lisa), weights(sft))
    losses = [[row["loss"] for row in read(t.run_dir / "events.jsonl")] for t in (lisa, sft)]
    assert losses[0] == losses[1]


def test_without_task_gradient_theta_contracts_to_the_anchor(tmp_path):
    """SGD: norm(theta - w_A) shrinks by 1 - eta rho a step; eta = 0.1, rho = 3."""
    defense = {"name": "lisa", "align_steps": 1, "finetune_steps": 20, "rho": 3.0, "warmup_share": 0.0}
    trainer, _, path = observed(tmp_path, defense, max_steps=8)

    def loss(run, model, inputs, items, default):
        return default() * (1.0 if run.progress.step <= 1 else 0.0)

    trainer.defense.task_loss = loss
    trainer.train()
    anchor = path[0]  # where alignment ended
    first = {name: path[1][name] - anchor[name] for name in anchor}
    assert max(float(d.abs().max()) for d in first.values()) > 1e-4
    for k in range(1, 7):
        for name, d in first.items():
            torch.testing.assert_close(path[1 + k][name] - anchor[name], d * 0.7**k, rtol=1e-3, atol=1e-6)


def test_proximal_gradient_is_rho_times_the_distance_and_zero_at_a_switch(tmp_path):
    defense = {"name": "lisa", "align_steps": 2, "finetune_steps": 3, "rho": 0.8}
    trainer, _, path = observed(tmp_path, defense, max_steps=8)
    start, terms = weights(trainer), []
    on_gradient = trainer.defense.on_gradient

    def noted(run):
        grads = {n: p for n, p in run.model.named_parameters() if p.requires_grad}
        before = {n: p.grad.clone() for n, p in grads.items()}
        on_gradient(run)
        terms.append({n: p.grad - before[n] for n, p in grads.items()})

    trainer.defense.on_gradient = noted
    trainer.train()
    thetas = [start, *path[:-1]]
    for t, (term, anchor) in enumerate(zip(terms, [0, 0, 2, 2, 2, 5, 5, 7], strict=True)):
        for name, value in term.items():
            apart = thetas[t][name] - thetas[anchor][name]
            torch.testing.assert_close(value, 0.8 * apart if t > 0.8 else 0 * apart, rtol=1e-4, atol=1e-6)
        zero = all(not value.any() for value in term.values())
        assert zero == (t in (0, 2, 5, 7))
