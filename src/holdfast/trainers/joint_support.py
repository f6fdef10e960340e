"""What in a run keeps its task loss from being computed beside the constraints' (`joint_step`)."""

from __future__ import annotations

from typing import Any

from holdfast.trainers.hooks import Defense

KNOWN = ("trl", "transformers", "holdfast")
"""Packages whose loss, step and batches the fused step reproduces."""


BATCH = frozenset({"input_ids", "attention_mask", "labels"})


def reason_against(trainer: Any) -> str | None:
    """Why this run's task loss is not the plain mean over its scored tokens, padded batch by padded batch; or None."""
    args = trainer.args
    strange = sorted(BATCH ^ set(trainer.batch_keys))
    for what, present in (
        ("FSDP shards the model", trainer.is_fsdp_enabled),
        ("packing or padding_free joins task rows already", args.packing or getattr(args, "padding_free", False)),
        (f"loss_type {args.loss_type!r} is not nll", args.loss_type not in (None, "nll")),
        ("label smoothing", args.label_smoothing_factor != 0),
        ("a compute_loss_func of your own", getattr(trainer, "compute_loss_func", None) is not None),
        ("an auxiliary loss", bool(getattr(trainer, "aux_loss_enabled", False))),
        ("NEFTune adds noise to the embeddings", getattr(args, "neftune_noise_alpha", None) is not None),
        ("activation offloading", bool(getattr(args, "activation_offloading", False))),
        ("Liger kernels", bool(getattr(args, "use_liger_kernel", False))),
        (f"batches have more or less than {', '.join(sorted(BATCH))}: {', '.join(strange)}", bool(strange)),
    ):
        if present:
            return what
    return _overridden(trainer) or _loss_of(trainer.defense)


def _package(thing: Any) -> str:
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def _overridden(trainer: Any) -> str | None:
    """A loss, or a step below ours, that is not TRL's: the fused step would go past it."""
    mro = type(trainer).__mro__
    ours = max(i for i, cls in enumerate(mro) if _package(cls) == "holdfast")
    for name, classes in (("compute_loss", mro), ("training_step", mro[ours:])):
        if name in vars(trainer):
            return f"the trainer's {name} is replaced"
        for cls in classes:
            if name in vars(cls) and _package(vars(cls)[name]) not in KNOWN:
                return f"{cls.__name__} has its own {name}"
    return None


def _loss_of(defense: Defense) -> str | None:
    """A loss that the fused step would go past.

    A class with `extra_loss` beside its own `joint_terms`, or `task_loss` beside its own `packed`, knows both steps:
    the terms are one's or the other's, and the loss is of a stage that is not packed.
    """
    for name, beside in (("task_loss", "packed"), ("extra_loss", "joint_terms")):
        owner = next(cls for cls in type(defense).__mro__ if name in vars(cls))
        if owner is not Defense and not vars(owner).get(beside):
            return f"defense {defense.name!r} has its own {name}"
    return None


def longest_row(args: Any) -> int | None:
    """A bound on the tokens of a row, where there is one."""
    if (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return None
    return None if args.max_length is None else int(args.max_length)
