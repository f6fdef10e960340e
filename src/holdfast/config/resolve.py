"""A `RunConfig` with nothing left implicit, as it is stored and hashed; secrets are blanked."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from holdfast.config.build import constraints, defense_options
from holdfast.config.fields import defaults
from holdfast.config.load import OWNED
from holdfast.config.schema import RunConfig
from holdfast.core.redaction import redact
from holdfast.records.run_record import settings_sha256


def resolved(config: RunConfig) -> dict[str, Any]:
    """Every setting of the run, defaults included, as plain JSON values in the shape of a run file."""
    from holdfast.trainers.config import SafeSFTConfig

    values = config.model_dump()
    options = defense_options(config)
    train = {name: value for name, value in defaults(SafeSFTConfig).items() if name not in OWNED}
    values["train"] = train | config.train
    blocks = {name: defaults(type(built)) | config.constraint[name] for name, built in constraints(config).items()}
    values["constraint"] = blocks if config.named else next(iter(blocks.values()))
    if not config.named:
        values["safety"] = next(iter(values["safety"].values()))
    is_filter = config.defense.name == "holdfast"
    values["filter"] = options if is_filter else {}
    values["defense"] = {"name": config.defense.name} | ({} if is_filter else options)
    plain: dict[str, Any] = redact(_plain(values))
    return plain


def config_sha256(config: RunConfig) -> str:
    """Hash of everything that can change the result: the resolved settings without `output_dir`."""
    return settings_sha256(resolved(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
