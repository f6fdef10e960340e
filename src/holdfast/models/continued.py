"""An adapter that goes on being trained, instead of being merged into its base."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, UnsupportedError
from holdfast.models.adapter import adapter_folder, base_of
from holdfast.models.adapter_limits import require_loadable
from holdfast.models.handle import check_vocabulary, load_model, load_tokenizer, resolve
from holdfast.models.library_errors import one_line_errors
from holdfast.models.unmerged import not_plain_lora

SAME = ("r", "lora_alpha", "lora_dropout", "target_modules")


def load_adapter_pair(
    ref: str | Path, wanted: Any, *, revision: str | None = None, trust_remote_code: bool = False, **options: Any
) -> tuple[Any, Any]:
    """The base with its LoRA adapter attached and trainable, and the tokenizer.

    theta_0 is base + adapter. The adapter's own shape must be the run's: it cannot change while it is trained.

    Args:
        ref: the adapter.
        wanted: PEFT's configuration that the run asks for.
        options: as for `load_model`.

    Raises:
        ConfigError: `ref` is no adapter, or one of another shape.
        UnsupportedError: it holds more than LoRA's matrices (DoRA, modules trained in full, biases).
    """
    from peft import PeftModel

    folder = adapter_folder(resolve(ref, revision, trust_remote_code))
    if folder is None:
        raise ConfigError(
            f"model {str(ref)!r} is not an adapter, so there is none to continue",
            remedy="use adapter_policy: merge, or name an adapter as the model",
        )
    if (more := not_plain_lora(folder)) is not None:
        raise UnsupportedError(
            f"adapter {folder} cannot be continued: {more}",
            remedy="use adapter_policy: merge, which takes any adapter on the weights",
        )
    base, base_revision = base_of(folder)
    model = load_model(base, revision=base_revision, trust_remote_code=trust_remote_code, **options)
    require_loadable(folder, model)
    with one_line_errors(folder, "adapter"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        model = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    _require_shape(model.peft_config[model.active_adapter], wanted, folder)
    tokenizer = load_tokenizer(ref, revision=revision, trust_remote_code=trust_remote_code)
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def _require_shape(found: Any, wanted: Any, folder: Path) -> None:
    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, set | list | tuple) else value

    for name in SAME:
        has, asked = plain(getattr(found, name, None)), plain(getattr(wanted, name, None))
        if has != asked and not (name == "target_modules" and asked == "all-linear"):
            raise ConfigError(
                f"adapter {folder}: its {name} is {has}, the run's lora block says {asked}",
                remedy="a continued adapter keeps its shape: write the same lora block, or use adapter_policy: merge",
            )
