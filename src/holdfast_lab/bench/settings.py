"""What to measure: shapes, paths, data and sizes of one benchmark, and the list of its measurements."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.library_types import LanguageModel
from holdfast.core.units import UNITS

BASELINE, BEST = TRL = ("trl_sft", "trl_best")
PATHS = {
    BASELINE: "trl.SFTTrainer at its defaults, no packing",
    BEST: "the same without padding; flash-attention and Liger's kernels where they are installed",
    "sft": "SafeSFTTrainer without a constraint, packed and recorded where that is possible",
    "two_pass": "task and safety batch one after the other",
    "fused": "both gradients from one pass",
    "holdfast": "one pass, CUDA graphs, inactive safety rows skipped: everything on",
    "run_file": "the same with a run file's two sets, refusals and answers, each with its unit and limit",
}
SWEEPS = {
    "batch": (2, 5, 10, 20, 40),
    "length": (64, 128, 256, 512),
    "rank": (4, 8, 16, 32, 64, 128),
    "safety_batch": (2, 5, 10, 20, 40),
}
SWEPT_PATHS = (BASELINE, "two_pass", "holdfast")
TASKS = ("sst2", "ag_news", "gsm8k")
ADAPTED = ("q_proj", "k_proj", "v_proj")  # a hybrid has these in its full-attention layers alone
EVERY = "all-linear"
MODULES = (
    EVERY, *ADAPTED, "o_proj", "gate_proj", "up_proj", "down_proj",
    "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj",  # of linear attention
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every path of a benchmark is measured with."""

    task: str = "sst2"  # whose lengths the rows have
    steps: int = 25
    warm_up: int = 5
    batch: int = 10
    safety_batch: int = 10
    rank: int = 32
    target_modules: tuple[str, ...] = ADAPTED  # what LoRA adapts, of `MODULES`
    tau: float = 0.1
    # unit: not of `run_file`. tau: of every constraint; a tiny one (1e-6) makes the filter correct nearly every step
    unit: str = "nll_token"
    options: str = ""  # of `defense: holdfast`, such as `anchor=true every=4`
    sweep: str = ""  # the setting that is varied, a name of `SWEEPS`; "" where none is
    seed: int = 42


@dataclass(frozen=True, kw_only=True)
class Cell(Sizes):
    """One training to be measured; `value` is what the swept setting is set to.

    `length` is the tokens of every row; None takes the data set's own lengths.
    """

    shape: str
    path: str
    checkpointing: bool
    length: int | None = None
    value: int | None = None

    @property
    def group(self) -> tuple[Any, ...]:
        """Rows of one group differ in their path alone, and are compared."""
        return self.shape, self.checkpointing, self.sweep, self.value


@dataclass(frozen=True, kw_only=True)
class Settings(Sizes):
    """One benchmark; refused where it cannot be measured."""

    shapes: tuple[str, ...]
    paths: tuple[str, ...] = ()  # names of `PATHS`; empty takes all but `trl_best`, in a sweep those of `SWEPT_PATHS`
    checkpointing: tuple[bool, ...] = (True, False)  # gradient checkpointing on (True), off, or both in turn
    checkpointed_paths: tuple[str, ...] = ()  # those of them to measure with checkpointing too; empty takes the same
    values: tuple[int, ...] = ()  # of the sweep; empty takes those of `SWEEPS`
    cudnn: bool = False  # leave cuDNN's attention on
    reference: bool = True  # measure the reference pass too
    drift: bool = True  # measure the baseline again at the end

    def __post_init__(self) -> None:
        names: list[tuple[str, Iterable[str], Iterable[str]]] = [
            ("--shape", self.shapes, SHAPES), ("--task", [self.task], TASKS), ("--paths", self.paths, PATHS),
            ("--checkpointed-paths", self.checkpointed_paths, PATHS), ("--unit", [self.unit], UNITS),
            ("--sweep", [self.sweep], ["", *SWEEPS]), ("--target-modules", self.target_modules, MODULES),
        ]  # fmt: skip
        for option, given, known in names:
            if unknown := [name for name in given if name not in known]:
                what = f"{option}: unknown {', '.join(unknown)}"
                raise ConfigError(what, remedy=f"use {', '.join(filter(None, known))}")
        if not self.shapes:
            raise ConfigError("no shape to measure", remedy=f"give --shape, one of {', '.join(SHAPES)}")
        if self.values and not self.sweep:
            raise ConfigError("--values without --sweep", remedy=f"add --sweep, one of {', '.join(SWEEPS)}")
        if not self.tau > 0:
            raise ConfigError(f"--tau is {self.tau:g}, expected more than 0", remedy="for example 0.1")
        if EVERY in self.target_modules and len(self.target_modules) > 1:
            raise ConfigError(f"--target-modules has {EVERY} beside other names", remedy=f"give {EVERY} alone")
        shortest = 3 if self.sweep == "length" else 1  # a row has a prompt, a reply and EOS
        limits = [
            ("--steps", self.steps, 1), ("--batch", self.batch, 1), ("--safety-batch", self.safety_batch, 1),
            ("--rank", self.rank, 1), ("--warm-up", self.warm_up, 0),
            *(("--values", value, shortest) for value in self.values),
        ]  # fmt: skip
        for name, value, least in limits:
            if value < least:
                raise ConfigError(f"{name} is {value}, expected at least {least}", remedy="set a larger number")

    def cells(self, shape: str) -> list[Cell]:
        """Every measurement of a shape, in order; the paths of one group follow one another."""
        sizes: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Sizes)}
        first = Cell(shape=shape, path=BASELINE, checkpointing=True, **sizes)
        values = self.values or SWEEPS[self.sweep] if self.sweep else ()
        changes: list[dict[str, Any]] = [{self.sweep: value, "value": value} for value in values]
        varied = [replace(first, **change) for change in changes or [{}]]
        paths = self.paths or (SWEPT_PATHS if self.sweep else tuple(path for path in PATHS if path != BEST))
        return [
            replace(cell, path=path, checkpointing=checkpointing)
            for checkpointing in self.checkpointing
            for cell in varied
            for path in (self.checkpointed_paths or paths if checkpointing else paths)
        ]


# Where the figures of `shapes.json` are from: Llama-3.1-8B and SmolLM2-135M, the `config.json` of their repositories on
# the hub. Qwen3.5-4B, the text part of its model: sizes, heads, vocabulary, rotary base and share as in
# `scripts/models/qwen3.5-4B.sh` of radixark/miles (which, unlike its script for 27B, does not untie the embeddings);
# the linear-attention heads and `mrope_section` are the defaults of transformers' `Qwen3_5TextConfig`, and those of the
# 9B's published configuration. Its vision tower and its extra prediction head take no part in training on text.
SHAPES: dict[str, dict[str, Any]] = json.loads(
    files("holdfast_lab.bench").joinpath("shapes.json").read_text(encoding="utf-8")
)


def empty_model(shape: str, **changes: object) -> LanguageModel:
    """A model of a shape on the meta device, names and sizes without weights; `changes` of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"max_position_embeddings": 4096, "pad_token_id": 2, "eos_token_id": 2, **SHAPES[shape], **changes}
    config = AutoConfig.for_model(fields.pop("model_type", "llama"), **fields)
    # A CPU's bfloat16 is emulated.
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def random_model(shape: str, *, seed: int = 0, **changes: object) -> LanguageModel:
    """A causal language model of a shape with random weights, filled on the GPU where there is one.

    Weights are drawn as transformers draws them for a new model: normal with deviation 0.02, norms at the identity,
    the decay of linear attention in its usual range; that also fills in rotary frequencies, buffers that the meta
    device left empty. Losses are then near log(vocabulary).
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = empty_model(shape, **changes).to_empty(device=device)
    model.tie_weights()
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            model._init_weights(module)
    model.name_or_path = f"random/{shape}"
    return model.eval()
