"""How far the degradations of an untrained adapter are from zero: what a constraint in bfloat16 cannot see below.

Nothing is trained (learning rate 0), so D is rounding alone: the reference pass and the step's pass see the same rows
in other batches. For every way to take a step: mean, standard deviation and extremes of D, and the mean of the ramp

    c = mean_i max(0, 1 + beta (D_i - tau)),    which the constraint wants at most alpha.

    HOLDFAST_DATA=... python benchmarks/rounding_noise.py --unit nll_sum
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig

import holdfast as hf
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.examples import prompt_text
from holdfast.models.handle import load_unmerged
from holdfast_lab.protocol.roles import RoleSettings, draw_roles

ROLES = {
    "safe": "refusals", "harm_prompts": "beavertails_test", "align": 60, "constraint": None, "monitor": 10,
    "certify": 10, "poison": 40, "asked": 10, "evaluation": 10, "harmful": 10, "seed": 42,
}  # fmt: skip
LIMIT: dict[str, Any] = {"tau": 0.1, "alpha": 0.05, "beta": 10.0, "allow_tau_below_noise": True}


def degradations(step: str, unit: Any, rows: list[dict[str, Any]], folder: str) -> torch.Tensor:
    """D of three batches of 20 safety rows, one after the other."""
    torch.manual_seed(0)
    model, tokenizer = load_unmerged("embedded", dtype="bfloat16")
    args = hf.SafeSFTConfig(
        folder, max_steps=3, per_device_train_batch_size=10, safety_batch_size=20, learning_rate=0.0, bf16=True,
        use_cpu=not torch.cuda.is_available(), report_to="none", save_strategy="no", step=step,
        gradient_checkpointing=False, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = hf.SafeSFTTrainer(
        model, args, processing_class=tokenizer, train_dataset=Dataset.from_list(rows[:30]),
        safety_dataset=Dataset.from_list(rows[30:]), constraint=hf.ChanceConstraint(**LIMIT, unit=unit),
        peft_config=LoraConfig(
            r=32, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )  # fmt: skip
    found, inner = [], trainer.run.engine.measure

    def noted(terms: Any) -> Any:
        measured = inner(terms)
        found.extend(one.degradations for one in measured.values())
        return measured

    trainer.run.engine.measure = noted
    trainer.train()
    return torch.cat(found)


def main() -> None:
    """Both steps, as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--unit", default="nll_sum", choices=["nll_sum", "nll_token", "nll_first"])
    unit = parser.parse_args().unit
    roles = draw_roles(RoleSettings(**ROLES))  # type: ignore[arg-type]
    rows = [{"prompt": prompt_text(e), "completion": e.completion} for e in roles.align]
    result: dict[str, Any] = {}
    for step in ("two_pass", "fused"):
        with tempfile.TemporaryDirectory() as folder:
            d = degradations(step, unit, rows, folder)
        ramp = float(torch.clamp(1 + LIMIT["beta"] * (d - LIMIT["tau"]), min=0).mean())
        result[step] = {"n": len(d), "mean": float(d.mean()), "sd": float(d.std()), "max": float(d.max()), "ramp": ramp}
    print(json.dumps({**result, "unit": unit, "commit": commit(), "hardware": hardware(), "versions": versions()}))


if __name__ == "__main__":
    main()
