"""The block `holdfast:` of an Axolotl file, and which other keys the plugin does not support beside it.

The block has the parts of a run file that Axolotl does not already have. Axolotl checks that its keys are known; what
they hold is checked where a run file is (`holdfast.runs.config`), with the same messages. Other keys are refused by
name, before data are read: what was not run, or where theta_0, the step or the saved weights are not what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import UnsupportedError

if TYPE_CHECKING:
    from axolotl.utils.dict import DictDefault

OF_RUN_FILE = ("safety", "conflicts", "screening", "monitor", "constraint", "defense")  # as in a run file
# Keys of `holdfast: {train: ...}`: the safety pass is holdfast's, everything else about training is Axolotl's.
TRAIN = (
    "safety_batch_size", "safety_micro_batch_size", "safety_eval_batch_size", "spikes", "probe_rows", "reference_cache",
)  # fmt: skip


class HoldfastSettings(BaseModel):
    """`holdfast:`; an empty block is `safety: auto` with every default."""

    model_config = ConfigDict(extra="forbid")

    safety: Any = "auto"
    conflicts: Any = None
    screening: dict[str, Any] | None = None
    monitor: dict[str, Any] | None = None
    constraint: dict[str, Any] | None = None
    defense: Any = None
    train: dict[str, Any] | None = None  # fields of the safety pass, those of `TRAIN`
    certify: bool = True  # open the closed prompts, once, after training; else `holdfast certify` does it later
    report: bool = True  # write report.html and the model card then


class HoldfastArgs(BaseModel):
    """What Axolotl adds to the keys of its file: the block; empty, or left out, it has every default."""

    holdfast: HoldfastSettings | None = Field(default_factory=HoldfastSettings)


_SFT = "use Axolotl's ordinary fine-tuning (no rl:, reward_model: or pretraining_dataset:)"
_WEIGHTS = "use adapter: lora, or no adapter, on unquantised weights"
_ONE = "train on one device: CUDA_VISIBLE_DEVICES=0 axolotl train FILE --launcher python"
_PLAIN = "remove the key"
REFUSED = {
    "rl": ("preference and reinforcement learning", _SFT),
    "reward_model": ("training a reward model", _SFT),
    "process_reward_model": ("training a process reward model", _SFT),
    "pretraining_dataset": ("continued pretraining: its text has no prompt to ask", _SFT),
    "streaming": ("streamed rows cannot be asked and numbered", "set streaming: false"),
    "skip_prepare_dataset": ("rows that Axolotl does not tokenise cannot be found again", _PLAIN),
    "processor_type": ("images and audio", "use a text data set and a text model"),
    "deepspeed": ("DeepSpeed was not run with this plugin", _ONE),
    "fsdp": ("FSDP was not run with this plugin", _ONE),
    "fsdp_config": ("FSDP was not run with this plugin", _ONE),
    "use_ray": ("Ray was not run with this plugin", _ONE),
    "layer_offloading": ("the safety pass would need its layers back", _PLAIN),
    "load_in_4bit": ("certificates do not load quantised models yet", _WEIGHTS),
    "load_in_8bit": ("certificates do not load quantised models yet", _WEIGHTS),
    "gptq": ("certificates do not load quantised models yet", _WEIGHTS),
    "qat": ("the saved weights are not those that were measured", _WEIGHTS),
    "fp8": ("the applied step is not the optimizer's", _WEIGHTS),
    "relora": ("the adapter is merged while training, so that theta_0 is lost", "use adapter: lora"),
    "lora_model_dir": ("an adapter that goes on training", "merge it into the model first (axolotl merge-lora)"),
    "lisa_step_interval": ("LISA changes which weights are trained", "use adapter: lora"),
    "unfrozen_parameters": ("some weights of a frozen model", "use adapter: lora, or train all weights"),
    "fix_untrained_tokens": ("it changes the model after theta_0 is measured", _PLAIN),
    "tokens": ("new tokens: theta_0 would not be the model as it is stored", _PLAIN),
    "added_tokens_overrides": ("new tokens: theta_0 would not be the model as it is stored", _PLAIN),
    "trainer_cls": ("a trainer of your own", _PLAIN),
    "kd_trainer": ("distillation", _PLAIN),
    "orpo_alpha": ("ORPO", _SFT),
    "trust_remote_code": ("code of the model's own", "use a model that transformers knows"),
    "hub_model_id": (
        "Axolotl pushes the whole output_dir, with the rows and the model's replies in it",
        "push the finished weights afterwards: holdfast report OUTPUT_DIR/holdfast --push-to-hub OWNER/NAME",
    ),
}  # fmt: skip
"""Keys that must be unset or false, each with what is wrong with it and what to do."""
SIZES = ("context_parallel_size", "tensor_parallel_size", "dp_shard_size", "dp_replicate_size", "expert_parallel_size")
ADAPTERS = (None, "", "lora")
PLUGINS = ("axolotl.integrations.liger.", "axolotl.integrations.cut_cross_entropy.", "axolotl.integrations.spectrum.")
"""Plugins of Axolotl that change neither the trainer nor what the loss is."""


def require_supported(cfg: DictDefault) -> None:
    """Refuse an Axolotl file that the plugin does not support; every case is named at once."""
    found = list(_problems(cfg))
    if len(found) == 1:
        key, why, remedy = found[0]
        raise UnsupportedError(f"{key} with the holdfast plugin: {why}", remedy=remedy)
    if found:
        listed = "".join(f"\n  - {key}: {why} ({remedy})" for key, why, remedy in found)
        raise UnsupportedError(f"the holdfast plugin does not support:{listed}", remedy="change these keys")


def _problems(cfg: DictDefault) -> Iterator[tuple[str, str, str]]:
    """Key, reason and remedy of everything that is set and not supported."""
    for key, (why, remedy) in REFUSED.items():
        if cfg.get(key):
            yield _shown(key, cfg[key]), why, remedy
    for key in SIZES:
        if (cfg.get(key) or 1) > 1:
            yield f"{key}: {cfg[key]}", "one model is spread over several devices", _ONE
    adapter = cfg.get("adapter")
    if adapter not in ADAPTERS:
        yield f"adapter: {adapter}", "only LoRA was run", _WEIGHTS
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield f"{os.environ['WORLD_SIZE']} processes", "several processes were not run with this plugin", _ONE
    others = [name for name in cfg.get("plugins") or () if "holdfast" not in name and not name.startswith(PLUGINS)]
    if others:
        yield f"plugins: {', '.join(others)}", "it may bring a trainer or a loss of its own", "remove it"


def _shown(key: str, value: object) -> str:
    """The key with its value where that is one word."""
    value = getattr(value, "value", value)  # of an enumeration, as it is written in the file
    if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= 40):
        return f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
    return f"{key}:"
