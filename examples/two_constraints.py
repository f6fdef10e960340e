"""Two constraints at once, from pairs of your own: keep the refusals, and keep answering what is harmless.

    python examples/two_constraints.py --model Qwen/Qwen2.5-1.5B-Instruct --task task.jsonl \\
      --refusals refusals.jsonl --answers answers.jsonl --output runs/two

All files have a prompt and a completion per line. Each constraint is split into examples that steer, that are
monitored, and that stay closed for a certificate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from datasets import load_dataset
from peft import LoraConfig

import holdfast as hf

TARGETS = ["q_proj", "k_proj", "v_proj"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "task", "refusals", "answers", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, default=-1, help="-1: three epochs")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)

    trainer = hf.SafeSFTTrainer(
        given.model,
        hf.SafeSFTConfig(
            given.output, learning_rate=3e-4, max_steps=given.steps, use_cpu=given.cpu, bf16=not given.cpu,
            report_to="none", save_strategy="no",
        ),
        train_dataset=load_dataset("json", data_files=given.task, split="train"),
        peft_config=LoraConfig(r=32, lora_alpha=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
        safety_dataset={
            "refusals": load_dataset("json", data_files=given.refusals, split="train"),
            "answers": load_dataset("json", data_files=given.answers, split="train"),
        },
        constraint={
            "refusals": hf.ChanceConstraint(unit="kl_first", majorizer="capped_ramp", tau=0.01, beta=100.0, alpha=0.05),
            "answers": hf.ChanceConstraint(tau=0.1, beta=10.0, alpha=0.10),
        },
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    names = [event["event"] for event in hf.events.read(given.output)]
    print(f"{len(names)} steps, {sum(name == 'active' for name in names)} of them corrected")
    for name, held in trainer.safety.items():
        print(f"{name}: {len(held.constraint_set)} steer, {len(held.monitor_set)} are monitored")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
