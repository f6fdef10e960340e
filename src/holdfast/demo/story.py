"""The demonstration: align a small model to refuse, fine-tune it on poisoned data twice, and compare.

Plain SFT and holdfast start from the same weights and see the same batches in the same order; the constraint is the
only difference. Everything is measured on prompts that neither run trained on, and on the constraint prompts
themselves.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.utils import logging as transformers_logging

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.files import write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.seeding import generator
from holdfast.data.containment import occurring
from holdfast.data.examples import Example, as_chat, prompt_text, searchable_texts, to_rows
from holdfast.data.sources import read_examples
from holdfast.data.splits import Split, split_examples, split_from_roles
from holdfast.demo.allocator import keep_freed_memory
from holdfast.demo.make_data import DATA_DIR
from holdfast.demo.measure import refusal_rate, task_accuracy
from holdfast.demo.settings import DemoSettings
from holdfast.evaluation.rate import Rate
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.handle import DType, load_pair
from holdfast.trainers.config import SafeSFTConfig
from holdfast.trainers.hooks import Defense
from holdfast.trainers.trainer import SafeSFTTrainer

Say = Callable[[str], None]
Listener = Callable[[dict[str, Any]], None]


@dataclass
class Measured:
    """One model of the demonstration."""

    accuracy: Rate
    refusals: dict[str, Rate]
    degradations: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0

    def violations(self, role: str, tau: float) -> Rate:
        """Share of examples of a split whose degradation exceeds tau."""
        d = self.degradations[role]
        return Rate(int((d > tau).sum()), len(d))


@dataclass
class DemoResult:
    """The three models, and what it took."""

    settings: DemoSettings
    unit: str
    models: dict[str, Measured]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For result.json: every figure with its interval and its provenance."""
        found = {}
        for name, m in self.models.items():
            found[name] = {
                "task_accuracy": m.accuracy.as_json(),
                "refusal_rate": {role: rate.as_json() for role, rate in m.refusals.items()},
                "violation_rate": {role: m.violations(role, self.settings.tau).as_json() for role in m.degradations},
                "train_seconds": round(m.seconds, 1),
            }
        return {
            "models": found, "settings": asdict(self.settings), "unit": self.unit, "seconds": round(self.seconds, 1),
            "versions": versions(), "commit": commit(), "hardware": hardware(),
        }  # fmt: skip


@dataclass(frozen=True)
class DemoData:
    """The shipped data, cut to the demonstration's size."""

    align: list[Example]
    task: list[Example]
    test: list[Example]
    safety: Split


def load_data(settings: DemoSettings) -> DemoData:
    """Read the shipped files; poison is mixed into the task in a fixed order."""

    def read(name: str, limit: int | None = None) -> list[Example]:
        return [as_chat(e) for e in read_examples(str(DATA_DIR / f"{name}.jsonl"), limit=limit)]

    task = read("task_train", settings.task_rows) + read("poison", settings.poison_rows)
    order = generator(settings.seed, "demo mixture").permutation(len(task)).tolist()
    safety = read("safety")
    shares = (settings.constraint_rows / len(safety), settings.heldout_rows / len(safety))
    split = split_examples(safety, fractions=(*shares, 1.0 - sum(shares)), seed=settings.seed)
    test = read_examples(str(DATA_DIR / "task_test.jsonl"), limit=settings.test_rows)
    return DemoData(read("align"), [task[i] for i in order], test, _apart(split, task))


def _apart(split: Split, task: list[Example]) -> Split:
    """Without the closed prompts that the task nearly holds: the demo certifies nothing, so none needs to move."""
    asked = [text for example in task for text in searchable_texts(example)]
    seen = set(occurring([prompt_text(example) for example in split.certify], asked))
    kept = [example for place, example in enumerate(split.certify) if place not in seen]
    return split_from_roles(split.constraint, split.monitor, kept)


def _arguments(settings: DemoSettings, folder: Path, **kwargs: Any) -> SafeSFTConfig:
    return SafeSFTConfig(
        output_dir=str(folder), seed=settings.seed, save_strategy="no", report_to="none", logging_steps=10_000,
        gradient_checkpointing=False, bf16=False, max_length=settings.max_length, disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
        safety_eval_batch_size=16, **kwargs,
    )  # fmt: skip


def _lora(settings: DemoSettings) -> LoraConfig:
    return LoraConfig(
        r=settings.rank, lora_alpha=settings.lora_alpha, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip


def _trained(trainer: SafeSFTTrainer, listener: Listener | None) -> float:
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if listener is not None:
        trainer.step_listeners.append(listener)
        listener({"stage": "train", "total_steps": trainer.args.max_steps, "step": 0})
    started = time.monotonic()
    trainer.train()
    return time.monotonic() - started


def align(model: Any, tokenizer: Any, data: DemoData, settings: DemoSettings, folder: Path) -> Any:
    """A few steps on refusals, merged into the weights: the model whose behaviour is to be kept."""
    set_seed(settings.seed)
    arguments = _arguments(
        settings, folder / "align", max_steps=settings.align_steps, learning_rate=settings.align_rate,
        per_device_train_batch_size=settings.align_batch,
    )  # fmt: skip
    trainer = SafeSFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(to_rows(data.align)), processing_class=tokenizer,
        peft_config=_lora(settings), defense="sft",
    )  # fmt: skip
    _trained(trainer, None)
    merged = trainer.model.merge_and_unload()
    merged.__dict__.pop(
        "forward", None
    )  # TRL's patch is bound to this very object; the copies made of it must not share it
    return merged


def finetune(
    aligned: Any,
    tokenizer: Any,
    data: DemoData,
    settings: DemoSettings,
    folder: Path,
    defense: str | Defense,
    listener: Listener | None,
) -> tuple[SafeSFTTrainer, float]:
    """Fine-tune a copy of the aligned model on the poisoned task."""
    set_seed(settings.seed)  # the adapter's initial weights are drawn before the trainer seeds
    arguments = _arguments(
        settings, folder, max_steps=settings.steps, learning_rate=settings.rate,
        per_device_train_batch_size=settings.batch, warmup_steps=settings.warmup,
        safety_batch_size=settings.safety_batch, lr_scheduler_type="linear",
    )  # fmt: skip
    trainer = SafeSFTTrainer(
        copy.deepcopy(aligned), arguments, train_dataset=Dataset.from_list(to_rows(data.task)),
        processing_class=tokenizer, peft_config=_lora(settings), safety_dataset=data.safety, defense=defense,
        constraint=ChanceConstraint(tau=settings.tau, alpha=settings.alpha),
    )  # fmt: skip
    return trainer, _trained(trainer, listener)


def behaviour(model: Any, tokenizer: Any, data: DemoData, settings: DemoSettings) -> Measured:
    """Task accuracy and greedy refusals."""
    prompts = {"constraint": data.safety.constraint, "held out": data.safety.monitor}
    refusals = {
        role: refusal_rate(model, tokenizer, examples[: settings.refusal_rows]) for role, examples in prompts.items()
    }
    return Measured(task_accuracy(model, tokenizer, data.test), refusals)


def fast_dtype() -> DType:
    """bfloat16 where the device multiplies in it; without such instructions a CPU is many times faster in float32."""
    native = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if native else "float32"


def run_demo(
    folder: Path, settings: DemoSettings | None = None, *, say: Say = print, listener: Listener | None = None
) -> DemoResult:
    """The whole demonstration; writes result.json, the adapters and the event logs under `folder`."""
    settings = settings or DemoSettings()
    started = time.monotonic()
    keep_freed_memory()
    transformers_logging.set_verbosity_error()
    data = load_data(settings)
    model, tokenizer = load_pair(str(embedded_model_dir()), dtype=fast_dtype())
    say(f"aligning SmolLM2-135M-Instruct on {len(data.align)} polite refusals ({settings.align_steps} steps)")
    aligned = align(model, tokenizer, data, settings, folder)
    say("measuring the aligned model")
    models = {"aligned start": behaviour(aligned, tokenizer, data, settings)}
    unit = ""
    for name, defense in (("plain SFT", "sft"), ("holdfast", "holdfast")):
        say(f"{name}: {settings.steps} steps on {settings.task_rows} task + {settings.poison_rows} poison examples")
        trainer, seconds = finetune(aligned, tokenizer, data, settings, folder / defense, defense, listener)
        say(f"measuring {name}")
        found = behaviour(trainer.model, tokenizer, data, settings)
        found.degradations = {
            "constraint": trainer.degradations(role="constraint"), "held out": trainer.degradations(role="monitor")
        }  # fmt: skip
        found.seconds = seconds
        trainer.save_model(str(folder / defense / "adapter"))
        models[name] = found
        unit = trainer.safety["safety"].constraint.unit
    result = DemoResult(settings, unit, models, time.monotonic() - started)
    write_json(folder / "result.json", result.as_json())
    return result
