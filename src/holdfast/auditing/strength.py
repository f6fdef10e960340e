"""The largest adapter strength that certifies, and the adapter at that strength as files.

At strength s a LoRA adapter is W + s * scaling * B A. The strengths 0.1, 0.2, ..., 1.0 are tested in this order, each
at the full level, until the first failure (Learn-then-Test with a fixed sequence); the search is one opening. What is
written has its B scaled by s, so that any PEFT reader loads exactly what was measured.
"""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from holdfast.auditing.pair import Pair
from holdfast.certification.assessment import tested_at
from holdfast.certification.learn_then_test import STRENGTHS, Tested, fixed_sequence
from holdfast.certification.terms import Rows, Terms
from holdfast.core.errors import CheckpointError, ConfigError
from holdfast.core.files import new_folder
from holdfast.models.content import content_of
from holdfast.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, DECISIVE

_SECOND = re.compile(r"\.lora_(embedding_)?B(\.|$)")
_ADAPTER = re.compile(r"\.after(?=\.|$)")  # the name that a pair gives the adapter of its second model


def search_strength(pair: Pair, measured: Callable[[], Rows], terms: Terms) -> Rows:
    """Measure strength after strength until the first one that does not certify; the rows of all of them."""
    pieces: list[Rows] = []

    def test(strength: float) -> Tested:
        pair.set_strength(strength)
        rows = measured()
        pieces.append(replace(rows, strength=np.full(len(rows.ids), strength)))
        return tested_at(pieces[-1], strength, terms)

    fixed_sequence(STRENGTHS, test, terms.level)
    return Rows.joined(pieces)


def write_strength(pair: Pair, strength: float, folder: Path) -> None:
    """Write `after` at a strength as an ordinary adapter: B as measured, everything else as it was."""
    source = pair.after.adapter
    assert source is not None, "set_strength refuses anything but an adapter"
    pair.set_strength(strength)
    with pair.on("after") as model:
        scaled = {_ADAPTER.sub("", name): p for name, p in model.named_parameters() if _SECOND.search(name)}
        tensors = _with_scaled(source / ADAPTER_WEIGHTS, scaled)
    if not folder.exists():
        with new_folder(folder) as made:
            _save(source, tensors, made)
        return
    with tempfile.TemporaryDirectory() as again:
        _save(source, tensors, Path(again))
        if content_of(folder).sha256 != content_of(again).sha256:
            raise ConfigError(f"{folder} exists and holds something else", remedy="name another folder with --output")


def _save(source: Path, tensors: dict[str, Any], folder: Path) -> None:
    """The tensors, with every other file of the adapter that counts."""
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    decisive = {path for pattern in DECISIVE for path in source.glob(pattern) if path.is_file()}
    for path in sorted({source / ADAPTER_CONFIG, *decisive}):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def _with_scaled(weights: Path, scaled: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, Any] = load_file(weights)
    factors = {name for name in tensors if _SECOND.search(name)}
    if factors != set(scaled):
        raise CheckpointError(
            f"{weights}: {len(factors)} B factors in the file, {len(scaled)} in the model: they do not correspond",
            remedy="save the adapter again with PEFT's save_pretrained",
        )
    return tensors | {name: tensor.detach().cpu().contiguous() for name, tensor in scaled.items()}
