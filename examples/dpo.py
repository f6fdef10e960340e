"""DPO on preferences that may teach what the model refuses: its own refusals and answers are held meanwhile.

    python examples/dpo.py --model Qwen/Qwen2.5-1.5B-Instruct --pairs pairs.jsonl --output runs/dpo

Each line has a prompt, a chosen and a rejected reply. The model is asked first: pairs whose chosen reply complies with
what it refuses are left out, up to a tenth of them; more end the script before training.
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
    parser.add_argument("--model", required=True, help="hub id or folder of a model that refuses")
    parser.add_argument("--pairs", required=True, help="JSON lines with prompt, chosen and rejected")
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=-1, help="-1: three epochs")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)

    trainer = hf.SafeDPOTrainer(
        given.model,
        args=hf.SafeDPOConfig(
            given.output, learning_rate=3e-4, max_steps=given.steps, use_cpu=given.cpu, bf16=not given.cpu,
            report_to="none", save_strategy="no",
        ),
        train_dataset=load_dataset("json", data_files=given.pairs, split="train"),
        peft_config=LoraConfig(r=32, lora_alpha=4, target_modules=TARGETS, task_type="CAUSAL_LM"),
    )  # fmt: skip
    assert trainer.screening is not None  # safety_dataset is "auto" unless given
    print(f"conflicts left out: {len(trainer.screening.conflicts)} of {trainer.screening.rows} pairs")
    trainer.train()
    trainer.save_model()
    behaviour = next(row["behaviour"] for row in reversed(hf.events.read(given.output)) if "behaviour" in row)
    for name, figure in behaviour.items():
        print(f"{name}: {figure['kept']} of {figure['of']}")
    return 0 if all(figure["passed"] for figure in behaviour.values()) else 4


if __name__ == "__main__":
    raise SystemExit(main())
