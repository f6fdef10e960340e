"""`holdfast.screen`: which rows of a data set conflict with what a model refuses, and the sets to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from holdfast.core.errors import ConfigError, DataError
from holdfast.data.bundled import KINDS, bundled_sha256
from holdfast.data.examples import Example, as_chat, uniform
from holdfast.data.sources import examples_from_rows, read_examples
from holdfast.data.splits import Split
from holdfast.data.templates import Template, use_template
from holdfast.judging.refusal_rules import RULES_REVISION
from holdfast.models.content import content_of
from holdfast.models.fingerprint import model_fingerprint
from holdfast.models.unmerged import load_unmerged
from holdfast.screening.asking import REMOTE, Asker, Told, asker_of, undisturbed
from holdfast.screening.record import content_sha256, task_sha256
from holdfast.screening.screen import Screening, screen_examples
from holdfast.screening.settings import ScreeningSettings


def screen(
    model: Any,
    dataset: Any,
    tokenizer: Any = None,
    *,
    settings: ScreeningSettings | None = None,
    template: Template = "chat",
    engine: str = "auto",
    engine_options: Mapping[str, Any] | None = None,
    replies: str | Path | None = None,
    dtype: str = "auto",
    device: str | None = None,
    told: Told | None = None,
) -> Screening:
    """Ask a model the prompts of a data set and sort its replies.

    Args:
        model: theta_0: a loaded model (with `tokenizer`), or its reference (hub id, folder, adapter, `embedded`).
        dataset: a file, a hub id, rows, or a `datasets.Dataset`, in the formats of `SafeSFTTrainer`.
        tokenizer: of a loaded model.
        settings: what is held, and what becomes of conflicts; `safety: auto` unless given.
        template: what becomes of plain prompts.
        engine, engine_options: see `holdfast.judging.engines`.
        replies: folder of the stored replies; the user's cache unless given.
        dtype, device: of a model that is given by its reference.
        told: receives what is asked, how many replies there are, and how many there will be.

    Returns:
        conflicts, the kept rows (`kept`), the held sets (`sets`) and what is watched (`monitor`). Pass it to
        `SafeSFTTrainer` as `safety_dataset`, with the same data set as `train_dataset`.
    """
    rows = task_examples(dataset, template)
    if engine in REMOTE:  # the server has the model; what it is called there is in the engine's identity
        loaded, digest = None, str(model)
    elif isinstance(model, str | Path):
        loaded, tokenizer = load_unmerged(model, dtype=dtype, device=device)
        use_template(tokenizer, template)
        digest = content_of(model).sha256
    else:
        loaded, digest = model, model_fingerprint(model)
        if tokenizer is None:
            raise ConfigError("a loaded model, and no tokenizer", remedy="pass tokenizer=..., or the model's reference")
    asker = asker_of(
        loaded, tokenizer, model_sha256=digest, template=template, engine=engine, options=engine_options,
        folder=None if replies is None else Path(replies), told=told,
    )  # fmt: skip
    return ask_and_screen(loaded, rows, asker, settings or ScreeningSettings(), template=template)


def ask_and_screen(
    model: Any,
    rows: list[Example],
    asker: Asker,
    settings: ScreeningSettings,
    *,
    template: Template,
    pairs: Iterable[Split] = (),
    listed: Path | None = None,
) -> Screening:
    """`screen_examples`, leaving the model's modes and all random states as they were."""
    with undisturbed(model):
        return screen_examples(rows, asker, settings, pairs=list(pairs), plain=template == "none", listed=listed)


def task_examples(dataset: Any, template: Template = "chat") -> list[Example]:
    """The rows of a data set as examples, one each, in order."""
    if isinstance(dataset, str | Path):
        found = read_examples(str(dataset))
    elif isinstance(dataset, list) and all(isinstance(row, Example) for row in dataset):
        found = cast(list[Example], dataset)
    elif hasattr(dataset, "__len__"):
        found = examples_from_rows(dataset, name="the task")
    else:
        raise DataError(
            f"the task is a stream ({type(dataset).__name__}): its rows cannot be asked and numbered",
            remedy="materialise it, for example with Dataset.from_list(list(stream))",
        )
    return uniform(found) if template == "none" else [as_chat(row) if row.kind == "plain" else row for row in found]


def belongs_to(model_sha256: str, rows: list[Example], settings: ScreeningSettings, template: str) -> dict[str, Any]:
    """What a stored screening is bound to."""
    sets = {name: {"prompts": list(one.prompts), "keep": one.keep} for name, one in settings.sets.items()}
    return {
        "model_sha256": model_sha256, "task_sha256": task_sha256(rows), "task_content_sha256": content_sha256(rows),
        "template": template, **asdict(settings), "sets": sets, "learn": sorted(settings.learn),
        "rules_revision": RULES_REVISION, "bundled_sha256": {name: bundled_sha256(name) for name in KINDS},
    }  # fmt: skip
