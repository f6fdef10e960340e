"""What a run is bound to: settings, data, tokenizer, base weights, reference.

A checkpoint in which any of these was another is refused, and so are processes that do not share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from holdfast.core.errors import DataError
from holdfast.core.hashing import plain, sha256_file, sha256_json, sha256_lines
from holdfast.core.ranks import gather_objects, world
from holdfast.data.encode import template_sha256, tokenizer_sha256
from holdfast.models.adapter import adapter_folder, adapter_settings_of
from holdfast.models.content import content_of
from holdfast.models.fingerprint import adapter_fingerprint, frozen_fingerprint, has_idle_adapter, model_fingerprint
from holdfast.models.model_files import ADAPTER_WEIGHTS
from holdfast.models.source import resolve
from holdfast.scoring.reference import data_sha256

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import TrainingArguments

    from holdfast.training.trainer import SafeTrainer

# Settings that change neither the trajectory nor what is stored. Batches of safety examples per pass, the path that
# computes a step and evaluation on a task set may change its last bits, and dropout's masks: they are left free, since
# they are what one changes after running out of memory, or on another machine.
HARMLESS = frozenset(
    """output_dir run_dir run_name report_to logging_dir logging_strategy logging_first_step logging_steps
    logging_nan_inf_filter log_level log_level_replica log_on_each_node disable_tqdm include_num_input_tokens_seen
    save_strategy save_steps save_total_limit save_on_each_node save_only_model enable_jit_checkpoint
    eval_strategy eval_steps eval_delay eval_on_start eval_accumulation_steps per_device_eval_batch_size do_eval
    do_train do_predict prediction_loss_only batch_eval_metrics eval_do_concat_batches eval_use_gather_object
    metric_for_best_model greater_is_better load_best_model_at_end rollback safety_eval_batch_size
    push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers
    dataset_num_proc resume_from_checkpoint restore_callback_states_from_checkpoint reference_cache
    project trackio_space_id debug skip_memory_metrics ddp_timeout ddp_backend local_rank deepspeed_plugin
    log_completions log_multimodal log_unique_prompts num_completions_to_print log_completions_hub_repo
    safety_micro_batch_size step step_graphs skip_inactive_rows probe_rows""".split()  # noqa: SIM905  (a list literal would take a line per name)
)


Unaligned: TypeAlias = str | Path | nn.Module
"""Weights before alignment: a reference, the folder of an alignment adapter, or a loaded model."""


# Settings that were not known to earlier versions: left out while they change nothing, so that their checkpoints fit.
LATER = {"spikes": (None,), "loss_weights": (None, "tokens")}
# Names that transformers 5.23 gave to settings whose old ones it keeps beside them: a run goes on with either version.
ALIASES = frozenset({"activation_checkpointing", "activation_checkpointing_kwargs"})


def argument_fingerprint(args: TrainingArguments) -> dict[str, object]:
    """Every training argument that shapes the trajectory."""
    names = [f.name for f in fields(args) if f.name not in HARMLESS | ALIASES and not f.name.startswith("_")]
    return {name: plain(value) for name in names if (value := getattr(args, name)) not in LATER.get(name, ())}


def unaligned_sha256(unaligned: Unaligned) -> str:
    """Which weights before alignment these are: of an adapter its own files, without its base, which is not read."""
    if isinstance(unaligned, nn.Module):
        return model_fingerprint(unaligned)
    adapter = adapter_folder(resolve(unaligned, None, trust_remote_code=False))
    if adapter is None:
        return content_of(unaligned).sha256
    place = ("base_model_name_or_path", "revision")
    settings = {key: value for key, value in adapter_settings_of(adapter).items() if key not in place}
    return sha256_json([sha256_file(adapter / ADAPTER_WEIGHTS), settings])


def dataset_sha256(dataset: Dataset) -> str:
    """Hash of the prepared rows (token ids, labels, packing lengths) in order; of its type for a stream."""
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__"):
        return sha256_json(["stream", type(dataset).__name__])
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = [name for name in ("input_ids", "labels", "seq_lengths") if name in dataset.column_names]
    if not columns:  # prepared by the user under names of their own
        return sha256_lines(repr(row) for row in dataset)
    digest = hashlib.sha256(str(columns).encode())
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=4096):
        for name in columns:
            column = table[name].combine_chunks()
            if isinstance(column, pa.ChunkedArray):
                column = pa.concat_arrays(column.chunks)
            digest.update(pc.list_value_length(column).to_numpy(zero_copy_only=False).tobytes())
            digest.update(column.flatten().to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def theta_0_provenance(trainer: SafeTrainer) -> dict[str, object]:
    """What theta_0 is: weights, tokenizer and how they compute."""
    tokenizer, model = trainer.processing_class, trainer.model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    idle = has_idle_adapter(model)  # then theta_0 is the base, and runs with other ranks and seeds share its losses
    return {
        "model": str(getattr(inner.config, "_name_or_path", "")) or type(inner).__name__,
        "weights": frozen_fingerprint(model) if idle else model_fingerprint(model),
        "adapter": None if idle else adapter_fingerprint(model),
        "tokenizer": tokenizer_sha256(tokenizer),
        "template": template_sha256(tokenizer),
        "max_length": trainer.args.max_length,
        "dtype": str(inner.dtype).removeprefix("torch."),
        "autocast": str(trainer.accelerator.mixed_precision),
        "attention": str(getattr(inner.config, "_attn_implementation", None)),
        "quantized": getattr(inner.config, "quantization_config", None) is not None,
    }


def require_same_inputs(trainer: SafeTrainer) -> None:
    """Refuse processes that read other data or settings than the first one; a collective call."""
    if world() == 1:
        return
    found = {"task data": dataset_sha256(trainer.train_dataset)}
    for name, one in trainer.safety.items():
        content = [data_sha256(one.all_encoded), one.split.record.to_json(), asdict(one.constraint)]
        found[f"safety set {name}"] = sha256_json(content)
    if trainer.run.data.harmful:
        found["harmful pairs"] = data_sha256(trainer.run.data.harmful)
    found["settings"] = sha256_json([argument_fingerprint(trainer.args), trainer.defense.describe()])
    require_equal(gather_objects(found))


def require_equal(every: Sequence[Mapping[str, str]]) -> None:
    """Refuse hashes (of each rank: what it is of, and its sha256) that differ from rank 0's, naming the ranks."""
    listed = []
    for name in dict.fromkeys(name for one in every for name in one):
        ranks = [str(rank) for rank, one in enumerate(every) if one.get(name) != every[0].get(name)]
        listed += [f"{name} on rank {', '.join(ranks)}"] if ranks else []
    if listed:
        raise DataError(
            f"the processes do not train on the same: {'; '.join(listed)} differs from rank 0",
            remedy="give every process the same files, versions and settings (on every machine), then start again",
        )
