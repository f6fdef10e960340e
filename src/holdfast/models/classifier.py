"""Sequence classifiers: a decoder and a linear head `score` on the hidden state of the last token.

logits = score(hidden[last]), the head in fp32. The last token is found from the mask here and not, as in transformers,
by comparing ids with the padding id: where padding is the end token, that finds the token before the end.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from holdfast.core.errors import CheckpointError, UnsupportedError
from holdfast.core.library_types import LanguageModel
from holdfast.models.adapter import lineage
from holdfast.models.fingerprint import tensors_fingerprint
from holdfast.models.library_errors import one_line_errors

HEAD = "score"
Precision = Literal["float32", "bfloat16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_classifier(
    ref: str | Path, *, revision: str | None = None, dtype: Precision = "float32", device: str | torch.device = "cpu"
) -> LanguageModel:
    """A full classifier with its trained head, in evaluation mode; the head is kept in fp32."""
    return _placed(_load(ref, revision, lacking=()), dtype, device)


def new_classifier(
    ref: str | Path, labels: Sequence[str], *, revision: str | None = None, dtype: Precision = "float32",
    device: str | torch.device = "cpu",
) -> tuple[LanguageModel, str]:  # fmt: skip
    """A language model with a fresh head, one logit per label, and the fingerprint of its backbone.

    The head is zeros: every run starts from probability 1/2, whatever the scale of the hidden states.
    """
    ids = {label: i for i, label in enumerate(labels)}
    names: dict[str, Any] = {"id2label": dict(enumerate(labels)), "label2id": ids}
    model = _load(ref, revision, num_labels=len(labels), problem_type="multi_label_classification", **names)
    nn.init.zeros_(model.score.weight)
    fingerprint = tensors_fingerprint(_backbone(model).state_dict())  # before the dtype changes
    return _placed(model, dtype, device), fingerprint


def classifier_on(
    ref: str | Path, settings: Path, *, revision: str | None = None, dtype: Precision = "float32"
) -> tuple[LanguageModel, str]:
    """The weights of a language model under the stored configuration `settings`; its head is still to be loaded.

    Returns the model on the CPU and the fingerprint of its backbone.
    """
    from transformers import AutoConfig

    with one_line_errors(settings, "judge"):
        config = AutoConfig.from_pretrained(settings)
    model = _load(ref, revision, config=config)
    fingerprint = tensors_fingerprint(_backbone(model).state_dict())
    return _placed(model, dtype, "cpu"), fingerprint


def add_lora(model: LanguageModel, *, base: str, rank: int, alpha: int, dropout: float) -> LanguageModel:
    """LoRA on every linear layer of the backbone, the head trained in full; `base` is what the adapter names."""
    from peft import LoraConfig, get_peft_model

    shape: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": "all-linear"}
    with one_line_errors(base, "model"):
        wrapped = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", modules_to_save=[HEAD], **shape))
    for settings in wrapped.peft_config.values():
        settings.base_model_name_or_path = base
    return wrapped


def labels_of(model: LanguageModel) -> tuple[str, ...]:
    """The names of the logits, in order."""
    return tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))


def class_logits(model: LanguageModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits (rows x labels, fp32) of right-padded rows: the head on the last token that `mask` counts."""
    hidden = _backbone(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    pooled = hidden[torch.arange(ids.shape[0], device=ids.device), mask.sum(dim=1) - 1]
    with torch.autocast(ids.device.type, enabled=False):
        return cast("Tensor", _inner(model).score(pooled.float()))


def right_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask; any id serves as padding, since nothing after a row's last token is looked at."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(ids, batch_first=True), pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)


def _load(
    ref: str | Path, revision: str | None, *, lacking: Sequence[str] = (f"{HEAD}.weight",), **options: Any
) -> LanguageModel:
    from transformers import AutoModelForSequenceClassification

    origin, named = lineage(ref, revision, False), f"classifier {str(ref)!r}"
    if origin.adapters:
        remedy = "merge it into its base first (PEFT's merge_and_unload, then save_pretrained)"
        raise UnsupportedError(f"{named} is a PEFT adapter, expected a full model", remedy=remedy)
    # A missing head is drawn at random before it is replaced; the caller's generator must not notice.
    with one_line_errors(ref, "classifier"), torch.random.fork_rng(devices=[]):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            origin.base, dtype="auto", use_safetensors=True, output_loading_info=True, **options
        )
    if not isinstance(getattr(model, HEAD, None), nn.Linear) or not hasattr(model, model.base_model_prefix):
        what = f"{named}: {type(model).__name__} has no linear head {HEAD!r} over a decoder"
        raise UnsupportedError(what, remedy="use a decoder such as Llama, Qwen or SmolLM2")
    if missing := set(info["missing_keys"]) - set(lacking):
        problem = f"{named} lacks {len(missing)} weights, first {min(missing)}: they would be random"
        raise CheckpointError(problem, remedy="restore the missing safetensors files, or name a trained classifier")
    return model


def _placed(model: LanguageModel, dtype: Precision, device: str | torch.device) -> LanguageModel:
    with one_line_errors(model.name_or_path, "classifier"):
        model = model.to(device=device, dtype=_DTYPES[dtype])
    model.score.float()
    return model.eval()


def _inner(model: LanguageModel) -> LanguageModel:
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _backbone(model: LanguageModel) -> LanguageModel:
    inner = _inner(model)
    return getattr(inner, inner.base_model_prefix)
