"""Shapes of the tensors in safetensors files, read from their headers, and what settings may ask for beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.models.library_errors import one_line_errors

_LAYER = re.compile(r"\.(\d{1,9})\.")
# A matrix may hold several sizes side by side (fused projections); a size beyond this multiple of the largest
# dimension in the files belongs to another model, and building it would take all memory.
SLACK = 4
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim")


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor in a file; no tensor is read.

    Raises:
        CheckpointError: the header is damaged.
    """
    from safetensors import safe_open

    with one_line_errors(path, "safetensors file"), safe_open(path, framework="np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (not a dict)


def require_sizes_of(config: Any, files: list[Path], what: str) -> None:
    """Refuse a configuration of a model that the weights are far too small for, before it is built.

    Layers: no more than the weights number; other sizes: at most `SLACK` times the largest dimension of a tensor.

    Raises:
        CheckpointError: naming the setting.
    """
    shapes = {name: shape for path in files for name, shape in tensor_shapes(path).items()}
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    layers = 1 + max((int(number) for name in shapes for number in _LAYER.findall(name)), default=-1)
    text = config.get_text_config()
    limits = {"num_hidden_layers": layers} | dict.fromkeys(SIZES, SLACK * largest)
    for name, limit in limits.items():
        asked = getattr(text, name, None)
        if isinstance(asked, int | float) and asked > limit:
            raise CheckpointError(
                f"{what}: config.json asks for {name} {asked}, its weights lack that: they have room for {limit}",
                remedy="restore config.json, or the weights that belong to it",
            )
