"""Loading models and tokenizers: from the hub, a folder, a PEFT adapter, or the embedded default.

`load_model` gives an ordinary model in bf16 or fp32 (or a quantised base): an adapter is merged into its base, so that
theta_0, the reference of every degradation, is the model as it enters fine-tuning. The other two leave the adapter
beside its base: merging would round W + s B A to the base's dtype, and a small update may be lost in bfloat16. Weights
are read from safetensors only, because a pickle runs code when it is opened.
"""

import importlib.util
import logging
import platform
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast.core.errors import CheckpointError, ConfigError, ResourceError, UnsupportedError
from holdfast.core.library_types import LanguageModel, LoraConfig, Tokenizer
from holdfast.models import adapter as adapters
from holdfast.models.chat_template import require_bounded
from holdfast.models.library_errors import one_line_errors
from holdfast.models.limits import require_sizes_of
from holdfast.models.model_files import TOKENIZER_CONFIG, weight_files
from holdfast.models.source import resolve

logger = logging.getLogger(__name__)

DType = Literal["auto", "bfloat16", "float32"]
Quantization = Literal["4bit", "8bit"]

_SHAPE = ("r", "lora_alpha", "lora_dropout", "target_modules")  # of an adapter
_DTYPES: dict[str, Any] = {"auto": "auto", "bfloat16": torch.bfloat16, "float32": torch.float32}


def load_tokenizer(ref: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """Tokenizer of a model; of an adapter, its own where it was saved with one, otherwise its base's.

    Without a padding token it pads with its end token, as TRL does: padding is masked by position here, never by token,
    so that the end token stays scored.
    """
    from transformers import AutoTokenizer

    origin = adapters.lineage(ref, revision, trust_remote_code)
    folder = next((adapter for adapter in origin.adapters if (adapter / TOKENIZER_CONFIG).is_file()), origin.base)
    with one_line_errors(ref, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    require_bounded(tokenizer.chat_template, str(ref))
    if folder is origin.base:
        tokenizer.name_or_path = origin.named
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    ref: str | Path, *, dtype: DType = "auto", revision: str | None = None, device: str | torch.device | None = None,
    quantization: Quantization | None = None, trust_remote_code: bool = False,
) -> LanguageModel:  # fmt: skip
    """Load a causal language model, in evaluation mode.

    Args:
        ref: hub id, local folder, `embedded`, or a PEFT adapter (folder or hub id), merged into its base.
        dtype: `auto` is the checkpoint's, on a CPU without instructions for bfloat16 float32; fp16 is refused.
        device: the CPU when None.
        quantization: load the base packed with bitsandbytes.
        trust_remote_code: run the repository's own code; for a hub id only at a pinned commit.
    """
    if dtype not in _DTYPES:
        what = f"model {str(ref)!r}: dtype {dtype!r} is not supported, expected one of {', '.join(_DTYPES)}"
        raise UnsupportedError(what, remedy="use bfloat16: under fp16 the loss scale enters the constraint's gradient")
    place = None if device is None else require_device(device)
    origin = adapters.lineage(ref, revision, trust_remote_code)
    if origin.adapters and quantization is not None:
        what = f"adapter {str(ref)!r} cannot be merged into a {quantization} base: merging would round it away"
        remedy = "merge it first (PEFT's merge_and_unload, then save_pretrained) and load that folder"
        raise UnsupportedError(what, remedy=remedy)
    options: dict[str, Any] = {"dtype": _DTYPES[dtype]}
    options |= {} if place is None else {"device_map": {"": place}}
    options |= {} if quantization is None else {"quantization_config": _quantization_config(quantization)}
    model = _load_full(origin.base, trust_remote_code, options)
    if dtype == "auto" and not getattr(model, "is_quantized", False) and fast_dtype(place) == "float32":
        model = model.float()
    for adapter in reversed(origin.adapters):
        model = adapters.merge(model, adapter)
        logger.info("merged the adapter %s into its base", adapter)
    model.name_or_path = str(ref) if origin.adapters else origin.named  # the base of an adapter trained on top of this
    return model


def load_pair(ref: str | Path, *, revision: str | None = None, **options: Any) -> tuple[LanguageModel, Tokenizer]:
    """Model and tokenizer of one reference, checked to fit together; `options` as for `load_model`."""
    trust = bool(options.get("trust_remote_code", False))
    tokenizer = load_tokenizer(ref, revision=revision, trust_remote_code=trust)
    model = load_model(ref, revision=revision, **options)
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def load_unmerged(
    ref: str | Path, *, revision: str | None = None, dtype: str = "auto", device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[LanguageModel, Tokenizer]:  # fmt: skip
    """Model and tokenizer as deployed, in evaluation mode; an adapter stays beside its base, which may be one too."""
    place = require_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {"dtype": dtype, "device": place, "trust_remote_code": trust_remote_code}
    if (folder := adapters.adapter_folder(resolve(ref, revision, trust_remote_code))) is None:
        return load_pair(ref, revision=revision, **options)
    tokenizer = load_tokenizer(ref, revision=revision, trust_remote_code=trust_remote_code)
    adapters.require_scorable(folder)
    base, base_revision = adapters.base_of(folder)
    model = adapters.attach(load_model(base, revision=base_revision, **options), {"default": folder})
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def load_adapter_pair(
    ref: str | Path,
    wanted: LoraConfig | None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[LanguageModel, Tokenizer]:
    """The base with its LoRA adapter attached to be trained further, theta_0, and the tokenizer.

    The adapter's own shape must be the run's: it cannot change while it is trained.
    """
    if (folder := adapters.adapter_folder(resolve(ref, revision, trust_remote_code))) is None:
        what = f"model {str(ref)!r} is not an adapter, so there is none to continue"
        raise ConfigError(what, remedy="use adapter_policy: merge, or name an adapter as the model")
    if (more := adapters.not_plain_lora(folder)) is not None:
        what = f"adapter {folder} cannot be continued: {more}"
        raise UnsupportedError(what, remedy="use adapter_policy: merge, which takes any adapter on the weights")
    base, base_revision = adapters.base_of(folder)
    model = load_model(base, revision=base_revision, trust_remote_code=trust_remote_code, **options)
    model = adapters.load_adapter(model, folder, is_trainable=True)
    _require_shape(model.peft_config[model.active_adapter], wanted, folder)
    tokenizer = load_tokenizer(ref, revision=revision, trust_remote_code=trust_remote_code)
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def _require_shape(stored: LoraConfig | None, wanted: LoraConfig | None, folder: Path) -> None:
    def plain(value: object) -> object:
        return sorted(value) if isinstance(value, set | list | tuple) else value

    for name in _SHAPE:
        has, asked = plain(getattr(stored, name, None)), plain(getattr(wanted, name, None))
        if has != asked and not (name == "target_modules" and asked == "all-linear"):
            what = f"adapter {folder}: its {name} is {has}, the run's lora block says {asked}"
            remedy = "a continued adapter keeps its shape: write the same lora block, or use adapter_policy: merge"
            raise ConfigError(what, remedy=remedy)


def fast_dtype(device: torch.device | None = None) -> DType:
    """bfloat16 where the device multiplies in it; without such instructions a CPU is many times faster in float32.

    Without a device: that which training would use.
    """
    on_cpu = device.type == "cpu" if device is not None else not torch.accelerator.is_available()
    return "float32" if on_cpu and not cpu_has_bfloat16() else "bfloat16"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply in bfloat16.

    oneDNN also says yes to AVX-512 without them, where it emulates them at a quarter of float32's speed.
    """
    if platform.machine().lower() in {"x86_64", "amd64"}:
        return bool(torch.cpu._is_avx512_bf16_supported())
    # Not in every build of torch.
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)())


def require_device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown", remedy="use cpu, cuda or cuda:0, ...") from error
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= there:
        visible = f"{there} CUDA devices" if there else "no CUDA device"
        what = f"device {str(device)!r}: torch sees {visible} here"
        raise ResourceError(what, remedy="use --device cpu, or install a torch built for your GPU and its driver")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise ResourceError(f"device {str(device)!r}: torch sees no such device here", remedy="use --device cpu")
    return place


def check_vocabulary(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with ids beyond the model's embeddings (on a GPU they crash far from the cause)."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        what = f"tokenizer {tokenizer.name_or_path!r} has ids up to {largest}, the model {rows} embeddings"
        remedy = "use the model's own tokenizer, or resize the model's embeddings before fine-tuning"
        raise ConfigError(what, remedy=remedy)


def _load_full(folder: Path, trust_remote_code: bool, options: dict[str, Any]) -> LanguageModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    files = [folder / name for name in weight_files(folder) if name.endswith(".safetensors")]
    options = {"use_safetensors": True, "output_loading_info": True, "trust_remote_code": trust_remote_code, **options}
    with one_line_errors(folder, "model"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        require_sizes_of(config, files, f"model {str(folder)!r}")
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    if missing := sorted(info["missing_keys"]):
        what = f"model {str(folder)!r} lacks {len(missing)} weights, first {missing[0]}: they would be random"
        remedy = "restore the missing safetensors files, or load with the class that saved them"
        raise CheckpointError(what, remedy=remedy)
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        what = f"model {str(folder)!r} is stored in fp16, which the barrier does not support"
        raise UnsupportedError(what, remedy="set dtype: bfloat16")
    return model.eval()


def _quantization_config(quantization: str) -> Any:
    """bitsandbytes settings: NF4, double quantisation and bf16 arithmetic for `4bit`, LLM.int8 for `8bit`."""
    if quantization not in {"4bit", "8bit"}:
        raise ConfigError(f"quantization {quantization!r} is unknown", remedy="use 4bit, 8bit or null")
    if importlib.util.find_spec("bitsandbytes") is None:
        what = f"quantization {quantization} needs bitsandbytes, which is not installed"
        raise ResourceError(what, remedy="pip install 'holdfast-llm[quantized]'")
    from transformers import BitsAndBytesConfig

    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,  # the same bits; as bytes FSDP2 would leave them whole on every GPU
    )  # fmt: skip
