"""What a forger does with evidence files: edit, and compute every checksum again. Only hashlib, json and yaml."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def canonical_sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(values: dict[str, Any], key: str = "sha256") -> dict[str, Any]:
    """With its checksum computed again; an object of the first release, which had none, as it is."""
    if key not in values:
        return values
    rest = {name: value for name, value in values.items() if name != key}
    return {**rest, key: canonical_sha256(rest)}


def edit(path: Path, change: Callable[[dict[str, Any]], Any], *, reseal: bool = True, key: str = "sha256") -> None:
    """Change a JSON file in place; `reseal` computes its checksum again."""
    values = json.loads(path.read_text())
    change(values)
    values = sealed(values, key) if reseal else values
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _same_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _same_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_same_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def rebind_config(run: Path) -> None:
    """Make result.json that of the config.yaml beside it."""
    config = run / "config.yaml"
    settings = {key: value for key, value in yaml.safe_load(config.read_text()).items() if key != "output_dir"}

    def bind(values: dict[str, Any]) -> None:
        values["config_sha256"] = canonical_sha256(_same_numbers(settings))
        if "config_file_sha256" in values:
            values["config_file_sha256"] = file_sha256(config)

    edit(run / "result.json", bind)


def rebind_table(audit: Path) -> None:
    """Make audit.json that of the audit.parquet beside it."""

    def bind(values: dict[str, Any]) -> None:
        if "table_sha256" in values:
            values["table_sha256"] = file_sha256(audit / "audit.parquet")

    edit(audit / "audit.json", bind)
