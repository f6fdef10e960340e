"""One Axolotl run that holdfast holds: what happens before its first step, and after its last.

Certificate and report are made by the `holdfast` command in a process of its own: Axolotl has patched the model classes
of this one.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.dict import DictDefault
from axolotl.utils.trainer import calculate_total_num_steps
from transformers import AutoTokenizer

from holdfast.core.adapter_card import ADAPTER_FILES, MODEL_FILES
from holdfast.core.errors import ConfigError, InfeasibleError, ResourceError, UnsupportedError
from holdfast.core.library_types import Tokenizer
from holdfast.integrations.axolotl.conversations import conversations
from holdfast.integrations.axolotl.run_setup import TASK, planned, write_task
from holdfast.integrations.axolotl.settings import require_supported
from holdfast.models.content import ModelContent, content_of
from holdfast.runs.config.resolve import ResolvedRun
from holdfast.runs.pipeline import RunResult, ask_theta_0, read_data
from holdfast.runs.stages.prepare import row_counts
from holdfast.runs.stages.result import Known, measured_result
from holdfast.runs.stages.run_folder import RunFolder, whole_folder
from holdfast.training.auto import without_conflicts
from holdfast.training.fitting import release
from holdfast.training.state_files import capture_rng, restore_rng

if TYPE_CHECKING:
    from holdfast.training.trainer import SafeSFTTrainer

logger = logging.getLogger(__name__)


@dataclass
class HeldRun:
    """A run between its first step and its evidence."""

    cfg: Any
    trainer: Any
    plan: ResolvedRun
    before: ModelContent
    known: Known
    started: float

    @classmethod
    def begin(cls, cfg: DictDefault, trainer: SafeSFTTrainer) -> HeldRun:
        """Ask the model, drop conflicts and measure theta_0; the random state stays as Axolotl left it."""
        state = capture_rng()
        plan = planned(cfg, trainer.args)
        _require_own_template(cfg, trainer.processing_class)
        folder = RunFolder(plan.folder)
        made = not plan.folder.exists()
        _require_free(folder, plan, cfg)
        plan.folder.mkdir(parents=True, exist_ok=True)
        try:
            write_task(plan.folder / TASK, conversations(cfg, trainer.processing_class, trainer.train_dataset))
            folder.write_config(plan.values)
            before, known = _hold(cfg, trainer, plan)
        except BaseException:
            if made:  # a run that was refused must not stand in the way of the next attempt
                shutil.rmtree(plan.folder, ignore_errors=True)
            raise
        restore_rng(state)
        return cls(cfg, trainer, plan, before, known, time.monotonic())

    def conclude(self) -> None:
        """Write result and audit, let the trainer go, then certificate and report."""
        if not self.trainer._finished():
            logger.warning("training did not reach its last step: no result is written in %s", self.plan.folder)
            return
        folder, adapter = RunFolder(self.plan.folder), self.plan.config.lora is not None
        with whole_folder(folder.adapter if adapter else folder.model) as staged:
            _take(Path(self.cfg.output_dir), staged, ADAPTER_FILES if adapter else MODEL_FILES)
        seconds = round(time.monotonic() - self.started, 3)
        known = replace(self.known, steps=int(self.trainer.state.global_step), seconds=seconds)
        result = RunResult(folder.path, measured_result(self.plan, self.trainer, self.before, known))
        closed = any(one.split.certify for one in self.trainer.safety.values())
        self.trainer = None
        release()  # the certificate needs the memory
        wanted = self.cfg.get("holdfast") or {}
        certified = _command("certify", folder.path) if closed and wanted.get("certify", True) else 0
        if wanted.get("report", True):
            _command("report", folder.path)
        _require_held(result, certified)


def _hold(cfg: DictDefault, trainer: SafeSFTTrainer, plan: ResolvedRun) -> tuple[ModelContent, Known]:
    config = plan.config
    data = read_data(config)
    before = content_of(config.model, revision=config.revision)
    data, screening = ask_theta_0(plan, data, (trainer.model, trainer.processing_class), before, ())
    if screening is not None and screening.dropped:
        trainer.train_dataset = without_conflicts(trainer.train_dataset, screening)
        _count_steps(cfg, trainer)
    trainer.hold(data.safety, plan.constraints, plan.defense)
    if screening is not None and screening.monitor.any:
        trainer.watch_behaviour(screening.monitor, plan.behaviour_limits, every=config.monitor.every)
    figures = None if screening is None else screening.figures()
    return before, Known(0, 0.0, trust_remote_code=False, data=row_counts(data), screening=figures)


def _count_steps(cfg: DictDefault, trainer: SafeSFTTrainer) -> None:
    """The number of steps and of warm-up steps of the rows that are left, as Axolotl counts them."""
    if cfg.max_steps:
        return
    unknown = {"total_num_tokens": None, "total_supervised_tokens": None, "sample_packing_eff_est": None}
    total = calculate_total_num_steps(DictDefault({**cfg, **unknown}), trainer.train_dataset, update=False)
    trainer.args.max_steps = total
    if cfg.warmup_steps is None:
        share = cfg.warmup_ratio
        steps = max(int(share * total), 0) if share is not None else min(math.floor(0.03 * total), 100)
        trainer.args.warmup_steps = 2 if steps == 1 else steps


def _require_own_template(cfg: DictDefault, tokenizer: Tokenizer) -> None:
    """Refuse another chat template than the model's own, in which it refuses."""
    own = AutoTokenizer.from_pretrained(str(cfg.base_model), revision=cfg.revision_of_model)
    if not own.chat_template:
        what = f"{cfg.base_model} has no chat template: it is no chat model, and has no refusals to hold"
        raise UnsupportedError(what, remedy="use an instruction-tuned model")
    if tokenizer.chat_template != own.chat_template:
        what = f"chat_template: {cfg.chat_template}: the model refuses in its own template, not in another one"
        raise UnsupportedError(what, remedy="set chat_template: tokenizer_default")


def _require_free(folder: RunFolder, plan: ResolvedRun, cfg: DictDefault) -> None:
    resume = bool(cfg.resume_from_checkpoint or cfg.auto_resume_from_checkpoints)
    try:
        folder.require_free(plan.values, resume=resume)
    except ConfigError as error:
        resuming = "auto_resume_from_checkpoints: true goes on with a run that was broken off"
        raise ConfigError(error.what, remedy=f"choose another output_dir; {resuming}") from error
    if folder.result.exists():
        raise ConfigError(f"the run in {folder.path} is finished", remedy="choose another output_dir")


def _take(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """The files that Axolotl saved, as links where the disk allows: the run folder is whole without another copy."""
    target.mkdir(parents=True)
    files = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
    if not any(path.suffix == ".safetensors" for path in files):
        raise ResourceError(f"{source} holds no saved weights", remedy="let Axolotl save the model as safetensors")
    for path in sorted(files):
        try:
            os.link(path, target / path.name)
        except OSError:
            shutil.copy2(path, target / path.name)


def _command(name: str, folder: Path) -> int:
    """Run `holdfast NAME FOLDER`; its exit code."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "AXOLOTL_"))}
    return subprocess.run([sys.executable, "-m", "holdfast", name, str(folder)], env=kept, check=False).returncode  # noqa: S603


def _require_held(result: RunResult, certified: int) -> None:
    """End with an error where behaviour was lost, or where the certificate was refused (its exit code is not 0)."""
    if not result.feasible:
        report = result.folder / "report.html"
        what = f"the constraint or the behaviour that is watched was not kept; {report} says what"
        raise InfeasibleError(what, remedy="lower learning_rate, or raise holdfast: {train: {safety_batch_size: ...}}")
    if certified:
        what = f"not certified (exit code {certified} of holdfast certify); the reason is printed above"
        remedy = "holdfast: {certify: false} leaves the closed prompts closed"
        raise InfeasibleError(what, remedy=f"{remedy}; later: holdfast certify {result.folder}")


class HoldfastPlugin(BasePlugin):
    """Holds the model's own refusals and answers while Axolotl fine-tunes it (docs/axolotl.md). What Axolotl calls:

    get_input_args        the keys `holdfast:` of its file
    load_datasets         what is not supported is refused, before data and model are loaded
    get_trainer_cls       Axolotl's trainer with the constraints' step
    post_trainer_create   the model is asked, conflicts leave the data, theta_0 is measured
    post_train_unload     result, audit, certificate and report
    """

    def __init__(self) -> None:
        super().__init__()
        self._run: HeldRun | None = None

    def get_input_args(self) -> str:
        return "holdfast.integrations.axolotl.settings.HoldfastArgs"

    def load_datasets(self, cfg: DictDefault, preprocess: bool = False) -> None:
        """Loads nothing: Axolotl does. It is the first call that only training makes, with checked settings."""
        if not preprocess:
            require_supported(cfg)

    def get_trainer_cls(self, cfg: DictDefault) -> type[Any]:
        from holdfast.integrations.axolotl.trainer import SafeAxolotlTrainer

        return SafeAxolotlTrainer

    def post_trainer_create(self, cfg: DictDefault, trainer: SafeSFTTrainer) -> None:
        self._run = HeldRun.begin(cfg, trainer)

    def post_train_unload(self, cfg: DictDefault) -> None:
        """The weights are saved by now; the last figures are taken and the trainer is let go."""
        if self._run is None:
            logger.warning("holdfast has no run to conclude: the trainer was not made by `axolotl train`")
            return
        run, self._run = self._run, None
        run.conclude()
