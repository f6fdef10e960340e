"""The trainers that are compared: each path is a real trainer over the same rows, with the same LoRA and optimizer.

Rows are random words with the token lengths of real rows, drawn from `lengths.json`, which `benchmarks/lengths.py`
wrote: SST-2, AG News, GSM8K and BeaverTails' safe and unsafe pairs in SmolLM2's chat template and tokenizer; numbers
only. Nothing is downloaded, and there is no text.
"""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_liger_kernel_available
from trl import SFTConfig, SFTTrainer

from holdfast.constraint.chance import ChanceConstraint
from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.core.library_types import LanguageModel, Tokenizer
from holdfast.core.seeding import generator
from holdfast.defaults import default, own_reply_defaults
from holdfast.training.config import SafeSFTConfig
from holdfast.training.trainer import SafeSFTTrainer, SafeTrainer
from holdfast_lab.bench.settings import BEST, EVERY, TRL, Cell, Sizes, random_model

logger = logging.getLogger("holdfast.bench")  # below `holdfast`, whose lines a measurement keeps
Pair = tuple[int, int]
Parts = dict[str, list[dict[str, str]]]
POISON_SHARE = 0.5
SPECIAL = ("<unk>", "<pad>", "<eos>")
WORDS = 500  # below every shape's vocabulary; its ids are 3 to 502
CONSTRAINT_ROWS, MONITOR_ROWS = 64, 8
MAX_LENGTH = 1024  # TRL's default
LEARNING_RATE, LORA_ALPHA = 1e-5, 4
EVERYTHING = {"step": "fused", "step_graphs": "auto", "skip_inactive_rows": "auto"}
# How each constrained path takes its step; fields of `SafeSFTConfig`.
STEPS = {
    "two_pass": {"step": "two_pass"},
    "fused": {"step": "fused", "step_graphs": "off", "skip_inactive_rows": "off"},
    "holdfast": EVERYTHING, "run_file": EVERYTHING,
}  # fmt: skip


@cache
def stored() -> dict[str, list[Pair]]:
    """(prompt tokens, reply tokens) by data set: the tasks, `safe` and `unsafe`."""
    found = json.loads(files("holdfast_lab.bench").joinpath("lengths.json").read_text(encoding="utf-8"))
    return {name: [(int(a), int(b)) for a, b in pairs] for name, pairs in found["pairs"].items()}


def task_pairs(task: str, n: int, *, seed: int, length: int | None = None) -> list[Pair]:
    """n rows of a task, half of them unsafe pairs, in random order; `length`: of all rows, half of it the prompt's."""
    if length is not None:
        return [(length // 2, length - length // 2)] * n
    poison = int(POISON_SHARE * n)
    mixed = [*_drawn("unsafe", poison, seed), *_drawn(task, n - poison, seed)]
    return [mixed[i] for i in generator(seed, "bench mixture").permutation(n)]


def safety_pairs(n: int, *, seed: int, length: int | None = None) -> list[Pair]:
    """n safe pairs; `length` as for the task."""
    return task_pairs("", n, seed=seed, length=length) if length is not None else _drawn("safe", n, seed)


def _drawn(name: str, n: int, seed: int) -> list[Pair]:
    pairs = stored()[name]
    order = generator(seed, "bench", name).permutation(len(pairs))
    return [pairs[order[i % len(pairs)]] for i in range(n)]


def word_tokenizer() -> Tokenizer:
    """One word is one token; plain text alone, without a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  (a token of text)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"  # noqa: S106
    )  # fmt: skip


def rows(pairs: Sequence[Pair], *, seed: int, name: str) -> list[dict[str, str]]:
    """A prompt/completion row for each pair, with exactly these token counts once EOS is added to the completion.

    Counts are at least 1 and 2. Rows of different names share no prompt, except by an accident of random words.
    """
    draw = generator(seed, "bench rows", name)

    def text(n: int) -> str:
        return " ".join(f"w{i}" for i in draw.integers(0, WORDS, n))

    return [{"prompt": f"{text(prompt)} ", "completion": text(reply - 1)} for prompt, reply in pairs]


@dataclass(frozen=True)
class Material:
    """The rows of a measurement and what reads them."""

    tokenizer: Any
    task: list[dict[str, str]]
    safety: Parts
    answers: Parts  # the second set of `run_file`

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """Rows for every step of a cell, each used once; the same for all paths of a group."""
        size = (cell.steps + cell.warm_up) * cell.batch
        constraint = max(CONSTRAINT_ROWS, cell.safety_batch)
        how: dict[str, Any] = {"seed": cell.seed, "length": cell.length}
        each = constraint + MONITOR_ROWS
        safe = rows(safety_pairs(2 * each, **how), seed=cell.seed, name="safety")
        task = rows(task_pairs(cell.task, size, **how), seed=cell.seed, name="task")
        sets: list[Parts] = [
            {"constraint": safe[start : start + constraint], "monitor": safe[start + constraint : start + each]}
            for start in (0, each)
        ]
        return cls(word_tokenizer(), task, *sets)


def held(cell: Cell, material: Material) -> dict[str, Any]:
    """The safety rows of a path and what they are held by."""

    def limit(**settings: Any) -> ChanceConstraint:
        """A run file's tau is below the rounding of random weights in bfloat16."""
        return ChanceConstraint(**{**settings, "tau": cell.tau, "beta": 1 / cell.tau}, allow_tau_below_noise=True)

    given = by_set(filter_options(cell.options))[1]
    if cell.path != "run_file":
        require_sets(given, ())
        return {"safety_dataset": material.safety, "constraint": limit(unit=cell.unit)}
    sets, unit = {"refusals": material.safety, "answers": material.answers}, default("constraint.unit")
    require_sets(given, sets)
    limits = {}
    for keep in sets:
        own = given.get(keep, {})
        limits[keep] = limit(**{"unit": unit, **own_reply_defaults(keep, own.get("unit", unit), own), **own})
    return {"safety_dataset": sets, "constraint": limits}


def build(cell: Cell, material: Material, folder: Path, cache: Path, callbacks: list[TrainerCallback]) -> SFTTrainer:
    """The trainer of a path over a freshly made model; reference losses are in `cache`, nothing else is kept."""
    gpu = torch.cuda.is_available()
    length = max(MAX_LENGTH, cell.length or 0)
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": cell.steps + cell.warm_up, "per_device_train_batch_size": cell.batch,
        "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "max_length": length, "bf16": gpu,
        "use_cpu": not gpu, "gradient_checkpointing": cell.checkpointing, "save_strategy": "no", "report_to": "none",
        "logging_strategy": "no", "disable_tqdm": True, "seed": cell.seed,
    }  # fmt: skip
    shared: dict[str, Any] = {
        "model": random_model(cell.shape), "train_dataset": Dataset.from_list(material.task),
        "processing_class": material.tokenizer, "peft_config": adapter(cell), "callbacks": callbacks,
    }  # fmt: skip
    if cell.path in TRL:
        arguments |= best_of_trl(shared["model"]) if cell.path == BEST else {}
        trainer = SFTTrainer(args=SFTConfig(**arguments), **shared)
    elif cell.path == "sft":
        trainer = SafeSFTTrainer(args=SafeSFTConfig(**arguments), defense="sft", **shared)
    else:
        arguments |= {"safety_batch_size": cell.safety_batch, "reference_cache": str(cache), **STEPS[cell.path]}
        defense = {"name": "holdfast", **by_set(filter_options(cell.options))[0]}
        trainer = SafeSFTTrainer(args=SafeSFTConfig(**arguments), defense=defense, **held(cell, material), **shared)
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    return trainer


def filter_options(text: str) -> dict[str, Any]:
    """`anchor=true metric=adam_unit` as options of the defense, which refuses what it does not know."""
    options: dict[str, Any] = {}
    for key, _, value in (part.partition("=") for part in text.split()):
        try:
            options[key] = json.loads(value)
        except ValueError:  # a word
            options[key] = value
    return options


def by_set(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Options of the defense, and of sets by name: `answers.first_k=32` is a limit of the answers."""
    own = {key: value for key, value in options.items() if "." not in key}
    limits: dict[str, dict[str, Any]] = {}
    for key in options.keys() - own.keys():
        name, _, field = key.partition(".")
        limits.setdefault(name, {})[field] = options[key]
    return own, limits


def require_sets(given: Collection[str], known: Collection[str]) -> None:
    """Refuse limits of sets that a path does not hold."""
    if unknown := sorted(set(given) - set(known)):
        what = f"options name the sets {', '.join(unknown)}, this path holds {', '.join(known) or 'no set by name'}"
        raise ConfigError(what, remedy="limits of sets are for the path run_file: refusals and answers")


def adapter(sizes: Sizes) -> LoraConfig:
    modules = EVERY if EVERY in sizes.target_modules else list(sizes.target_modules)
    how = {"lora_alpha": LORA_ALPHA, "lora_dropout": 0.0, "target_modules": modules, "task_type": "CAUSAL_LM"}
    return LoraConfig(r=sizes.rank, **how)


def best_of_trl(model: LanguageModel) -> dict[str, Any]:
    """What makes TRL's step fast on this machine: arguments for its trainer, and the attention of the model.

    A step keeps its rows. TRL's packing drops padding too, and puts more rows into a step, as `--batch` does.

    Raises:
        UnsupportedError: rows behind one another would run into one another.
    """
    kinds = getattr(model.config, "layer_types", None) or ()
    if "linear_attention" in kinds and not all(map(find_spec, ("fla", "causal_conv1d"))):
        what = "no flash-linear-attention and causal-conv1d, which keep the rows of a batch without padding apart"
        raise UnsupportedError(what, remedy="install both")
    if is_flash_attn_3_available() or is_flash_attn_2_available():  # what `padding_free` is documented for
        model.set_attn_implementation(f"flash_attention_{3 if is_flash_attn_3_available() else 2}")
    else:
        logger.info("no flash-attention: without padding, attention takes all pairs of a batch's tokens, under a mask")
    liger = torch.cuda.is_available() and is_liger_kernel_available()
    return {"padding_free": True, "max_length": None, "use_liger_kernel": liger}


def found_in_trl(trainer: SafeTrainer) -> dict[str, Any]:
    """What was on in a training of TRL's trainer, read off the model after it."""
    model = trainer.model.get_base_model()
    forwards = (vars(module).get("forward") for module in model.modules())
    return {
        "padding_free": trainer.padding_free, "packing": trainer.args.packing,
        "attention": model.config._attn_implementation,
        "liger": any(getattr(forward, "__module__", "").startswith("liger_kernel") for forward in forwards),
    }  # fmt: skip
