"""Checkpoints of a run: atomic, hashed, free of pickle, and refused when anything they are bound to has changed.

Replaces the Trainer's `optimizer.pt`, `scheduler.pt`, `rng_state*.pth` and `training_args.bin`. A folder `checkpoint-N`
holds `trainable.safetensors`, the adapter as PEFT writes it, `optimizer.*`, `scheduler.*`, `rng-<rank>.*`, `defense.*`,
`course.*` (state as JSON + safetensors), `trainer_state.json`, the tokenizer, and `manifest.json` with the sha256 of
all others.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.trainer_callback import EarlyStoppingCallback, ExportableState
from transformers.trainer_utils import TrainOutput

from holdfast.core.errors import CheckpointError
from holdfast.core.files import write_json
from holdfast.core.ranks import barrier, from_first, gather_objects, rank, world
from holdfast.models.fingerprint import adapter_settings
from holdfast.training import snapshot
from holdfast.training.checkpoint_store import CheckpointStore
from holdfast.training.fingerprint import argument_fingerprint, dataset_sha256
from holdfast.training.hooks import Defense
from holdfast.training.run import Run, torch_optimizer
from holdfast.training.state_files import capture_rng, load_state, restore_rng, save_state
from holdfast.training.zero import ZeroTrainer

logger = logging.getLogger(__name__)


class CheckpointMixin(ZeroTrainer):
    """Overrides every place where the Trainer writes or reads a checkpoint."""

    defense: Defense
    run: Run
    _theta_0: dict[str, Any]
    _measured: bool
    measure_reference: Callable[[], None]

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(Path(self.args.output_dir))

    def fingerprint(self) -> dict[str, object]:
        """Everything a resumed run must share with the one that wrote the checkpoint."""
        if not hasattr(self, "_task_sha256"):
            self._task_sha256 = dataset_sha256(self.train_dataset)
        return {
            "arguments": argument_fingerprint(self.args),
            "defense": self.defense.describe(),
            "constraints": {name: asdict(s.constraint) for name, s in self.safety.items()},
            "theta_0": self._theta_0,
            "adapter": adapter_settings(self.model),
            "task_data": self._task_sha256,
            "references": {name: s.reference.sha256 for name, s in self.safety.items() if s.reference is not None},
            "splits": {name: s.split.record.to_json() for name, s in self.safety.items()},
            "processes": world(),
            **self.optimizer_parts(),
            **self.run.data.fingerprint(),
        }

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Stage, seal and publish `checkpoint-<step>`."""
        step, store = int(self.state.global_step), self.store
        self.store_flos()
        if rank() == 0:
            store.stage(step)
        barrier()
        folder = store.staging(step)
        with store.disk_guard(step):
            weights = self._write_state(folder)
        barrier()
        if rank() == 0:
            self._locate_best()
            with store.disk_guard(step):
                states = {name: [c.state() for c in group] for name, group in self._stateful_callbacks().items()}
                self.state.stateful_callbacks = {**states, "TrainerControl": self.control.state()}
                self.state.save_to_json(str(folder / "trainer_state.json"))
                self._write_readable(folder, weights)
            self.recorder.log_file().sync()
            store.commit(step, fingerprint=self.fingerprint())
            if not self.recorder.spikes.in_a_row:  # else an older one may be the last good one
                store.rotate(self.args.save_total_limit, self.protected_checkpoints())
        barrier()
        self.state.best_model_checkpoint = gather_objects(self.state.best_model_checkpoint)[0]
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(store.root / f"checkpoint-{step}"))

    def protected_checkpoints(self) -> set[Path]:
        """Checkpoints that rotation must leave: the best so far, and the one that a rollback would return to."""
        best = [Path(self.state.best_model_checkpoint)] if self.state.best_model_checkpoint else []
        watched = self.behaviour_monitor if self.args.rollback else None
        return {*best, *(() if watched is None else watched.protected())}

    def _write_state(self, folder: Path) -> dict[str, Tensor]:
        """Write what a resumed run reads back and return the trained weights; gathering shards needs every rank."""
        weights = snapshot.trainable_weights(self.model)
        optimizer = snapshot.optimizer_state(torch_optimizer(self.optimizer))
        defense = self.defense.state_dict()
        save_state(folder / f"rng-{rank()}", capture_rng())
        if rank() == 0:
            snapshot.save_trainable(weights, folder)
            save_state(folder / "optimizer", optimizer)
            save_state(folder / "scheduler", self.lr_scheduler.state_dict())
            save_state(folder / "defense", defense)
            course = {"spikes": self.recorder.spikes.state_dict(), "memory": self.run.fitting.figures()}
            save_state(folder / "course", course)
        return weights

    def _locate_best(self) -> None:
        """Point at the best checkpoint in this folder, where it is or is about to be: the run may have been moved."""
        best = self.state.best_global_step
        folder = self.store.root / f"checkpoint-{best}"
        if best and (folder.exists() or best == self.state.global_step):
            self.state.best_model_checkpoint = str(folder)

    def _stateful_callbacks(self) -> dict[str, list[ExportableState]]:
        """Callbacks that carry a state (early stopping), by class name, in the order they were added."""
        found: dict[str, list[Any]] = {}
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback)
        return found

    def _write_readable(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """The adapter as PEFT writes it, so that a checkpoint can be loaded like any other, and the tokenizer."""
        if hasattr(self.model, "peft_config"):
            with self.defense.saved_form(self.run):
                # Only rank 0 is here, and it cannot read a sharded model alone.
                self.model.save_pretrained(str(folder), state_dict=weights if self.is_fsdp_enabled else None)
        self.processing_class.save_pretrained(str(folder))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, but under FSDP2, where it writes nothing (SHARDED_STATE_DICT) or the frozen base too."""
        if not self.is_fsdp_enabled:
            with self.defense.saved_form(self.run):
                super().save_model(output_dir, _internal_call)
            return
        gathered = snapshot.trainable_weights if hasattr(self.model, "peft_config") else snapshot.all_weights
        state = gathered(self.model)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """As the Trainer's, with the arguments as JSON instead of a pickle."""
        super()._save(output_dir, state_dict)
        pickled = Path(output_dir or self.args.output_dir) / "training_args.bin"
        if self.args.should_save and pickled.exists():  # transformers 5.23 calls this in every process
            pickled.unlink()
            write_json(pickled.with_suffix(".json"), argument_fingerprint(self.args))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object) -> TrainOutput:
        """As the Trainer's; a checkpoint is verified and compared with this run before anything is loaded."""
        wanted = resume_from_checkpoint
        chosen = from_first(lambda: str(self._verified(wanted))) if wanted else None  # the first process looks
        return super().train(chosen, *args, **kwargs)

    def _verified(self, wanted: str | bool) -> Path:
        """The checkpoint at a path, or the newest whole one; refused where it belongs to another run."""
        self.store.clean()
        path = self.store.latest(log=logger.warning) if wanted is True else Path(str(wanted))
        if path is None:
            raise CheckpointError(f"no checkpoint in {self.store.root}", remedy="start without resume_from_checkpoint")
        if wanted is not True:
            CheckpointStore(path.parent).verify(path)
        if self._measured:
            self.store.require_same_fingerprint(path, self.fingerprint())
        return path

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Measure theta_0 and compare fingerprints if that is still to do, then load the trained weights over it."""
        if not self._measured:
            self.measure_reference()
            self.store.require_same_fingerprint(Path(resume_from_checkpoint), self.fingerprint())
        snapshot.load_trainable(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        CheckpointStore(folder.parent).verify(folder)
        snapshot.load_trainable(self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        snapshot.load_optimizer_state(torch_optimizer(self.optimizer), load_state(folder / "optimizer"))
        self.lr_scheduler.load_state_dict(load_state(folder / "scheduler"))
        self.defense.load_state_dict(load_state(folder / "defense"))
        if (folder / "course.json").exists():  # not in checkpoints of earlier versions
            course = load_state(folder / "course")
            self.recorder.spikes.load_state_dict(course["spikes"])
            self.run.fitting.load_figures(course["memory"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            restore_rng(load_state(Path(checkpoint) / f"rng-{rank()}"))

    def _init_training_state(self, *args: object, **kwargs: object) -> Any:
        """As the Trainer's, which forgets a best checkpoint that is no longer at its stored path."""
        found = super()._init_training_state(*args, **kwargs)
        self._locate_best()
        return found

    def _load_callback_state(self) -> None:
        """Always, where the Trainer does it on request: a patience counted anew would make another run."""
        for name, callbacks in self._stateful_callbacks().items():
            for callback, stored in zip(callbacks, self.state.stateful_callbacks.get(name, ()), strict=False):
                for attribute, value in stored["attributes"].items():
                    setattr(callback, attribute, value)

    def _run_epoch(self, **kwargs: object) -> None:
        """As the Trainer's, which, resumed after the last step, would take one more before it looks at the limit."""
        if kwargs["resume_from_checkpoint"] is not None and self._finished():
            self.control.should_training_stop = True
        else:
            super()._run_epoch(**kwargs)

    def _finished(self) -> bool:
        """Whether the run has no step left. A request to stop (a signal) does not count: a resumed run goes on."""
        patient = (c for c in self.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback))
        stopped = any(c.early_stopping_patience_counter >= c.early_stopping_patience for c in patient)
        return stopped or int(self.state.global_step) >= int(self.state.max_steps)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Only fp16 has a scaler, and fp16 is refused."""

    def _save_scaler(self, output_dir: str) -> None:
        """Only fp16 has a scaler, and fp16 is refused."""
