"""The models that a run begins with: theta_0 with its tokenizer and adapter, and the weights before alignment."""

import logging
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.data.templates import use_template
from holdfast.models.adapter import adapter_folder, base_of
from holdfast.models.alignment_shift import require_merged
from holdfast.models.handle import load_pair
from holdfast.models.source import resolve as resolve_model
from holdfast.models.unmerged import load_adapter_pair
from holdfast.runs.config import RunConfig
from holdfast.runs.config.resolve import ResolvedRun, peft_config

logger = logging.getLogger(__name__)


def load_start(config: RunConfig, trust_remote_code: bool) -> tuple[Any, Any, Any]:
    """theta_0, its tokenizer with the run's template, and the adapter to put on it (None: nothing new is put on)."""
    wanted = peft_config(config)
    options: dict[str, Any] = {
        "dtype": config.dtype, "revision": config.revision, "quantization": config.quantization,
        "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    if config.adapter_policy == "merge":
        model, tokenizer = load_pair(config.model, **options)
    else:
        model, tokenizer = load_adapter_pair(config.model, wanted, **options)
        wanted = None
    use_template(tokenizer, config.template)
    return model, tokenizer, wanted


def unaligned_of(plan: ResolvedRun, trust_remote_code: bool) -> str | None:
    """Where the weights before alignment are: as named, or the adapter that `model` is; None where nothing asks."""
    config = plan.config
    if "unaligned" not in plan.needs:
        return None
    if config.unaligned is not None:
        require_merged(config.unaligned, config.model)
        return config.unaligned
    folder = adapter_folder(resolve_model(config.model, config.revision, trust_remote_code))
    if folder is None:
        raise ConfigError(
            f"defense {config.defense.name} needs the weights before alignment, and {config.model} is no adapter",
            remedy="name the model it was aligned from: `unaligned: owner/base`",
        )
    below, below_revision = base_of(folder)
    if adapter_folder(resolve_model(below, below_revision, trust_remote_code)) is not None:
        logger.warning(
            "%s is an adapter on the adapter %s: the last one alone is taken for the alignment; "
            "where it is not, name the weights before alignment (`unaligned`)", folder, below,
        )  # fmt: skip
    return str(folder)
