"""A model as it is deployed: an adapter stays beside its base.

Merging would round W + s B A to the base's dtype, and a small update may be lost in bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from holdfast.models.adapter import adapter_folder, base_of
from holdfast.models.device import require_device
from holdfast.models.handle import check_vocabulary, load_model, load_tokenizer, resolve
from holdfast.models.unmerged import attach, require_scorable


def load_unmerged(
    ref: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Model and tokenizer, in evaluation mode; an adapter is attached to its base, which itself may be an adapter.

    Args:
        ref: as for `load_model`.
        device: the first GPU where there is one, otherwise the CPU, when None.
    """
    place = require_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {"dtype": dtype, "device": place, "trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(ref, revision=revision, trust_remote_code=trust_remote_code)
    folder = adapter_folder(resolve(ref, revision, trust_remote_code))
    if folder is None:
        model = load_model(ref, revision=revision, **options)
    else:
        require_scorable(folder)
        base, base_revision = base_of(folder)
        model = attach(load_model(base, revision=base_revision, **options), {"default": folder})
    check_vocabulary(model, tokenizer)
    return model, tokenizer
