"""`holdfast judge train` from data to folder: read, train, measure, save in one rename."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.core.files import new_folder, unwritable, write_json
from holdfast.core.provenance import commit, hardware, versions
from holdfast.core.seeding import derive_seed
from holdfast.judging.judges.classifier import CONVERSATION, THRESHOLD, Opened, device_of, require_positions
from holdfast.judging.judges.trained import JUDGE_FILE, VERSION, hashes
from holdfast_lab.data.catalogue import CATEGORIES
from holdfast_lab.evaluation.judge_figures import fit_temperature, judge_figures
from holdfast_lab.evaluation.judge_training import JudgeSettings, Progress, finite_logits, fit, judge_data, prepare


def train_judge(
    output_dir: str | Path, settings: JudgeSettings | None = None, *, folder: Path | None = None,
    device: str | None = None, progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a judge on BeaverTails and write its folder, which must be new; returns the content of judge.json.

    `progress` gets `{"stage", "total_steps", "step"}` once and `{"step"}` or `{"step", "loss"}` a step.
    """
    chosen = settings or JudgeSettings()
    target = Path(output_dir)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"output folder {target} exists", remedy="name a new folder, or delete this one")
    if (above := unwritable(target)) is not None:
        raise ConfigError(f"output folder {target} cannot be made in {above}", remedy="name a place that is writable")
    started = time.monotonic()
    draw = {name: getattr(chosen, name) for name in ("seed", "validation", "limit", "test_limit")}
    data = judge_data(**draw, folder=folder)
    opened, base = _open(chosen, device_of(device))
    train, choice, test = parts = [
        prepare(opened.tokenizer, pairs, CATEGORIES, chosen.max_length)
        for pairs in (data.train, data.validation, data.test)
    ]
    ready = time.monotonic()
    history = fit(opened, train, choice, chosen, progress)
    seconds = {"train": time.monotonic() - ready}
    temperature = fit_temperature(finite_logits(opened, choice).max(axis=1), choice.unsafe)
    labels = [pair.categories for pair in data.test]
    figures = judge_figures(finite_logits(opened, test), test.unsafe, labels, CATEGORIES, temperature=temperature)
    seconds["total"] = time.monotonic() - started
    truncated = {name: part.truncated for name, part in zip(("train", "validation", "test"), parts, strict=True)}
    with new_folder(target) as place:
        _save_weights(opened, place)
        description = {
            "version": VERSION, "kind": chosen.kind, "categories": list(CATEGORIES), "input_format": CONVERSATION,
            "threshold": THRESHOLD, "max_length": chosen.max_length, "base": base, "temperature": temperature,
            "figures": figures, "history": history, "data": {**data.record, "truncated": truncated},
            "seconds": {key: round(value, 1) for key, value in seconds.items()},
            "training": {**asdict(chosen), "learning_rate": chosen.rate}, "files": hashes(place),
            "provenance": {"versions": versions(), "commit": commit(), "hardware": hardware()},
        }  # fmt: skip
        write_json(place / JUDGE_FILE, description)
    return description


def _open(settings: JudgeSettings, device: str) -> tuple[Opened, dict[str, Any]]:
    from holdfast.models.classifier import add_lora, new_classifier
    from holdfast.models.handle import check_vocabulary, load_tokenizer
    from holdfast.models.source import EMBEDDED

    given = Path(settings.base).expanduser()
    ref = str(given.resolve()) if settings.base != EMBEDDED and given.is_dir() else settings.base
    tokenizer = load_tokenizer(ref, revision=settings.base_revision)
    model, fingerprint = new_classifier(
        ref, CATEGORIES, revision=settings.base_revision, dtype=settings.dtype, device=device
    )
    check_vocabulary(model, tokenizer)
    require_positions("judge training", model, settings.max_length)
    if not settings.full:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(settings.seed, "judge lora"))
            model = add_lora(model, base=ref, rank=settings.rank, alpha=2 * settings.rank, dropout=settings.dropout)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    opened = Opened(model, tokenizer, tuple(CATEGORIES), autocast=device.startswith("cuda"))
    return opened, {"ref": ref, "revision": settings.base_revision, "weights_sha256": fingerprint}


def _save_weights(opened: Opened, place: Path) -> None:
    """Weights in bfloat16, to which training has rounded them; configuration and tokenizer beside them."""
    opened.tokenizer.save_pretrained(place)
    opened.model.config.save_pretrained(place)
    model = opened.model.cpu().to(torch.bfloat16)
    # PEFT would otherwise ask the hub for the base's vocabulary, under a name that may be none.
    model.save_pretrained(place, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {}))
    (place / "README.md").unlink(missing_ok=True)  # PEFT's model card, an empty form
