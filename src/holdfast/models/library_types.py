"""Names for objects of transformers and PEFT, for annotations alone: nothing is imported when the program runs."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from peft import LoraConfig as LoraConfig
    from peft import PeftModel
    from transformers import PreTrainedModel

    LanguageModel: TypeAlias = PreTrainedModel | PeftModel
    """A transformers model, with PEFT's wrapper around it where it has an adapter."""
