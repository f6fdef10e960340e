"""A small byte-level BPE tokenizer, trained here, and chat templates of three shapes."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}<|im_end|>"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
# The generation prompt ends with an empty thought block that the finished conversation does not have.
THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think></think>"
    "{% endif %}{% endif %}",
)
TEMPLATES = {"chatml": CHATML, "inst": INST, "thinking": THINKING}

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "<|pad|>"]
CORPUS = ["the quick brown fox jumps over the lazy dog", "user assistant system", "please tell me a story"] * 20


def build_tokenizer(*, template=CHATML, pad_token="<|pad|>", eos_token="<|im_end|>", bos=False):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos_token,
        pad_token=pad_token,
        chat_template=template,
        model_max_length=4096,
    )


@pytest.fixture(scope="session")
def make_tokenizer():
    return build_tokenizer


@pytest.fixture(scope="session")
def templates():
    return TEMPLATES


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()
