"""What a training step costs under every defense, in one process and one run, in the form of the paper's profile.

Random weights at a published shape; rows of SST-2 with half of them BeaverTails' unsafe pairs (the task), and
BeaverTails' safe pairs (safety and alignment), so lengths are real. LoRA r = 32 on q, k, v, batches of 10, bfloat16.
Each defense trains a fresh model for 5 warm-up and 25 measured steps; plain SFT is measured first and again last. A
step is timed from the end of the one before it, the device synchronised. AsFT and SafeLoRA get a random alignment
adapter of rank 32, the case of a model that was aligned with LoRA. tau is tiny, so that constraints are at work and
safety rows have a gradient: the costliest case. cuDNN's attention is switched off: it builds a plan for every new shape
of a batch, and 25 batches of text are 25 shapes (`--cudnn` leaves it on).

    python benchmarks/defense_cost.py --shape llama-3.1-8b --output out/cost
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig
from shapes import NAMES, SHAPES, random_adapter, random_model
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

import holdfast as hf
from holdfast.core.files import write_json
from holdfast.core.hashing import sha256_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.data.templates import use_template
from holdfast.models.handle import load_tokenizer
from holdfast.runs.stages.finetune import build_trainer
from holdfast.runs.stages.prepare import Prepared, prepare
from holdfast.training import fingerprint as training
from holdfast.training.config import SafeSFTConfig
from holdfast.training.hooks import DEFENSES, make_defense

WARM_UP, MEASURED = 5, 25
ROLES = {
    "safe": "beavertails", "harm_prompts": "beavertails_test", "align": 200, "constraint": None, "monitor": 8,
    "certify": 0, "harmful": 100, "poison": 500, "evaluation": 10, "seed": 42,
}  # fmt: skip
# Lisa alternates: one guide batch in ten, and its proximal term on from the start, so that 25 steps show its mean cost.
OPTIONS: dict[str, dict[str, Any]] = {"lisa": {"align_steps": 1, "finetune_steps": 9, "warmup_share": 0.0}}
UNITS = {"holdfast": ("nll_token", "kl_token")}
TAU = {"nll_token": 1e-6, "kl_token": 1e-9}


class StepClock(TrainerCallback):
    """Seconds of every step and the peak of the measured ones' memory."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.last = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note how long the step took."""
        now = _now()
        self.seconds.append(now - self.last)
        self.last = now
        if state.global_step == WARM_UP and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(shape: str, stage: str, name: str, unit: str, data: Prepared, tokenizer: Any, batch: int) -> dict[str, Any]:
    """Train with one defense and return its figures."""
    defense = make_defense({"name": name, **OPTIONS.get(name, {})})
    spent = {hook: _timed(defense, hook) for hook in ("initialise", "transform")}
    clock, events = StepClock(), Counter[str]()
    model = random_model(shape)
    with tempfile.TemporaryDirectory() as folder:
        unaligned = random_adapter(shape, Path(folder) / "alignment") if "unaligned" in defense.needed(stage) else None
        arguments = SafeSFTConfig(
            folder, stage=stage, max_steps=WARM_UP + MEASURED, per_device_train_batch_size=batch, save_strategy="no",
            learning_rate=1e-5, lr_scheduler_type="constant", weight_decay=0.1, max_length=512, report_to="none",
            gradient_checkpointing=False, bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(),
            safety_batch_size=batch, reference_cache=f"{folder}/cache", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        limit = hf.ChanceConstraint(unit=unit, tau=TAU[unit], beta=1 / TAU[unit], allow_tau_below_noise=True)
        lora = LoraConfig(
            r=32, lora_alpha=4, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        trainer = build_trainer(
            model=model, tokenizer=tokenizer, data=data, constraints={"safety": limit} if data.safety else {},
            defense=defense, arguments=arguments, peft_config=lora, callbacks=[clock],
            unaligned=unaligned, rows=Path(folder),
        )  # fmt: skip
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.step_listeners.append(lambda row: events.update([row["event"]] if "event" in row else []))
        trainer.train()
        path = trainer.run.engine_name
        steps = clock.seconds[WARM_UP:]
        peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
    del trainer, model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    median = statistics.median(steps)
    return {
        "stage": stage, "defense": name, "setting": f"unit={unit}" if name in UNITS else "",
        "step_ms": 1e3 * median, "p90_ms": 1e3 * statistics.quantiles(steps, n=10, method="inclusive")[-1],
        "gpu_mb": peak, "samples_per_s": batch / median, "steps_s": steps,
        "path": path, "events": dict(events),
        "once_ms": {hook: 1e3 * sum(s) for hook, s in spent.items()},
    }  # fmt: skip


def _timed(defense: Any, hook: str) -> list[float]:
    """Seconds that a hook called once takes, filled in while it runs."""
    seconds: list[float] = []
    inner = getattr(defense, hook)

    def timed(run: Any) -> None:
        start = _now()
        inner(run)
        seconds.append(_now() - start)

    setattr(defense, hook, timed)
    return seconds


def result(row: dict[str, Any], shape: str, x_sft: float, protocol: dict[str, Any]) -> dict[str, Any]:
    """One row as a result file that `holdfast tables` reads."""
    metrics = {key: row[key] for key in ("step_ms", "p90_ms", "gpu_mb", "samples_per_s")} | {"x_sft": x_sft}
    cell = ".".join(filter(None, ["cost", shape, row["stage"], row["defense"], row["setting"].replace("=", "-")]))
    return {
        "version": 1, "cell": cell, "model": NAMES[shape], "model_ref": f"random weights, {shape}",
        "task": "sst2" if row["stage"] == "finetune" else "align", "defense": row["defense"], "label": row["defense"],
        "setting": row["setting"], "align": "sft", "seed": 42,
        "poison_ratio": 0.5 if row["stage"] == "finetune" else 0.0,
        "protocol_sha256": sha256_json(protocol), "protocol": protocol,
        "metrics": {key: {"value": value, "low": None, "high": None, "n": MEASURED} for key, value in metrics.items()},
        **{key: row.get(key) for key in ("once_ms", "steps_s", "path", "events", "drift")},
        "provenance": {"versions": versions(), "commit": commit(), "hardware": hardware()},
    }  # fmt: skip


def plan(wanted: list[str] | None) -> list[tuple[str, str, str]]:
    """(stage, defense, unit) of every measurement; SFT opens and closes each stage."""
    found = []
    for stage in ("finetune", "align"):
        names = [
            n for n, cls in DEFENSES.items() if {stage, *(["posthoc"] if stage == "finetune" else [])} & {*cls.stages}
        ]
        names = [n for n in names if n != "sft" and (wanted is None or n in wanted)]
        if names:
            found += [(stage, n, u) for n in ["sft", *names, "sft"] for u in UNITS.get(n, ("nll_token",))]
    return found


def main() -> None:
    """Measure, print as it goes, and write a result file per row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--defenses", nargs="*")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--tokenizer", default="embedded")
    parser.add_argument("--cudnn", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    datasets.disable_progress_bars()
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn)
    training.frozen_fingerprint = lambda _: "random"  # hashing 16 GB for every row would take longer than measuring it
    tokenizer = load_tokenizer(options.tokenizer)
    use_template(tokenizer, "chat")
    shared: dict[str, Any] = {"template": "chat", "seed": 42, "roles": ROLES, "harmful": {"role": "harmful"}}
    safety = {"safety": {"role": "constraint", "on_leak": "error"}}
    task = {"name": "sst2", "size": 1000, "poison_ratio": 0.5}
    data = {
        "finetune": prepare(task, safety, **shared),
        "align": prepare({"role": "align"}, {}, **shared),
    }  # fmt: skip
    protocol = {
        "tau": TAU,
        "roles": ROLES,
        "batch": options.batch,
        "lora": "r=32 on q, k, v",
        "lengths": "SST-2, BeaverTails",
        "cudnn": options.cudnn,
    }
    measure(options.shape, "finetune", "sft", "nll_token", data["finetune"], tokenizer, options.batch)  # kernels load
    baseline: dict[str, dict[str, Any]] = {}
    for stage, name, unit in plan(options.defenses):
        row = measure(options.shape, stage, name, unit, data[stage], tokenizer, options.batch)
        first = baseline.setdefault(stage, row)
        if name == "sft" and first is not row:
            first["drift"] = row["step_ms"] / first["step_ms"]
            row = first
        stored = result(row, options.shape, row["step_ms"] / first["step_ms"], protocol)
        write_json(options.output / f"{stored['cell']}.json", stored)
        print(
            f"{stage:9s} {name:16s} {row['setting']:15s} median {row['step_ms']:8.1f} ms  p90 {row['p90_ms']:8.1f}  "
            f"peak {row['gpu_mb']:8.0f} MiB  {row['samples_per_s']:6.2f}/s  x{row['step_ms'] / first['step_ms']:.2f}  "
            f"memory x{row['gpu_mb'] / max(first['gpu_mb'], 1):.2f}  {row['path']}  {row['events']}  "
            f"once {row['once_ms']}  drift {row.get('drift')}",
            flush=True,
        )


if __name__ == "__main__":
    main()
