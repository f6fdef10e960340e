"""Names for objects of transformers and PEFT, for annotations alone: neither is imported when the program runs."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import peft
    import transformers
    from peft.tuners.tuners_utils import BaseTunerLayer

    AdapterLayer: TypeAlias = BaseTunerLayer
    LanguageModel: TypeAlias = transformers.PreTrainedModel | peft.PeftModel
    """A transformers model, with PEFT's wrapper around it where it has an adapter."""
    LoraConfig: TypeAlias = peft.LoraConfig
    ModelConfig: TypeAlias = transformers.PretrainedConfig
    Tokenizer: TypeAlias = transformers.PreTrainedTokenizerBase
else:
    AdapterLayer = LanguageModel = LoraConfig = ModelConfig = Tokenizer = object
