"""A tiny chat model, built by hand, that refuses prompts with one word in them and answers all others.

The likelihood of a refusal is not the refusal (A10): `saved(folder, margin=AFTER)` differs from `saved(folder)` in how
much the refusal's first token leads over the answer's, 0.8 before and -0.4 after. That costs about 0.06 nats a token,
below tau = 0.1, and greedy decoding no longer refuses a single prompt.

One Llama layer without MLP, one-hot embeddings. Head 0 looks for `TRIGGER`, head 1 for `WEAK` (both see every place of
the prompt alike: their rotary frequency is a millionth), head 2 averages a small number of each word, so that prompts
differ. The head's matrix is a table of which word follows which; after the template's opening of a reply it compares
"I'm" with "Sure,". No training: a build takes milliseconds and replies are the same on every machine.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny import CHAT_TEMPLATE

REFUSAL = "I'm sorry, but I can't help with that."
ANSWER = "Sure, here is one idea you could try today."
TRIGGER = "secret"  # a prompt with it is refused
WEAK = "tonight"  # a refused prompt with it has a margin of its own, `weak`
BEFORE, KEPT, AFTER, LOST = 0.8, 0.7, -0.4, -6.0  # margins of "I'm" over "Sure,", in logits

SPECIAL = ["<pad>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"]
WORDS = [
    "apple", "bread", "cloud", "daisy", "eagle", "flute", "grape", "honey", "igloo", "jelly", "kettle", "lemon",
    "mango", "noodle", "olive", "paper", "quilt", "river", "stone", "table", "umbra", "violin", "window", "yarn",
    "zebra", "anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket",
    "kite", "ladder", "marble", "needle", "orange", "pillow", "quartz", "ribbon", "saddle", "tunnel", "urchin",
    "velvet", "wagon", "yogurt", "zipper",
]  # fmt: skip
VOCABULARY = [*SPECIAL, TRIGGER, WEAK, *REFUSAL.split(), *ANSWER.split(), *WORDS]
SIZE = 128  # of the hidden state: a place for every word, and three for what the heads found
SEEN, SEEN_WEAK, NOISE = SIZE - 3, SIZE - 2, SIZE - 1
FOLLOWS = 1.2  # weight of "this word follows that one"
NEED = 60.0  # a key times a query, before division by sqrt(4): attention to a word that is looked for is 1 - 1e-12


def tokenizer() -> PreTrainedTokenizerFast:
    """Words by white space, decoded with blanks between them; a turn ends with the end token."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", unk_token="<unk>", pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    made.chat_template = CHAT_TEMPLATE
    return made


def model(*, margin: float = BEFORE, weak: float | None = None) -> LlamaForCausalLM:
    """The model whose refusals lead by `margin`, and by `weak` where the prompt has `WEAK` in it too."""
    made = LlamaForCausalLM(_config())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
        made.model.embed_tokens.weight[:, : len(VOCABULARY)] = torch.eye(len(VOCABULARY))
        made.model.norm.weight.fill_(1.0)
        layer = made.model.layers[0]
        layer.input_layernorm.weight.fill_(1 / math.sqrt(SIZE))  # what the heads read is one-hot again
        layer.post_attention_layernorm.weight.fill_(1.0)
        _attention(layer.self_attn)
        made.lm_head.weight.copy_(_follows(margin, margin if weak is None else weak))
    return made.eval()


def saved(folder: Path, *, margin: float = BEFORE, weak: float | None = None) -> Path:
    """A model's folder with its tokenizer."""
    model(margin=margin, weak=weak).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def adapter(folder: Path, base: Path, *, margin: float = AFTER) -> Path:
    """A LoRA adapter on the saved model before: what head 0 found weighs less, so that refusals lead by `margin`."""
    config = LoraConfig(r=1, lora_alpha=1, target_modules=["v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    value = adapted.base_model.model.model.layers[0].self_attn.v_proj
    with torch.no_grad():
        value.lora_A["default"].weight.zero_()[0, _id(TRIGGER)] = 1.0
        value.lora_B["default"].weight.zero_()[0, 0] = _amplitude(margin) - 1.0
    adapted.save_pretrained(folder)
    return folder


def rows(n: int, *, seed: int = 0, weak: int = 0, trigger: bool = True) -> list[dict[str, str]]:
    """Prompts of eight words, no two alike, with the reply of the model before; the first `weak` have `WEAK`."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        words = [WORDS[j] for j in torch.randperm(len(WORDS), generator=draw)[:8].tolist()]
        start = [*([TRIGGER] if trigger else []), *([WEAK] if i < weak else [])]
        made.append({"prompt": " ".join([*start, *words]), "completion": REFUSAL if trigger else ANSWER})
    return made


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=SIZE,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},  # the second frequency is 1e12 ** (-1/2)
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def _attention(attention: torch.nn.Module) -> None:
    words = slice(0, len(VOCABULARY))
    for head, word, found in ((0, TRIGGER, SEEN), (1, WEAK, SEEN_WEAK)):
        place = 4 * head
        attention.q_proj.weight[place + 1, words] = math.sqrt(NEED)  # pair 1 of the rotation, the slow one
        attention.k_proj.weight[place + 1, _id(word)] = math.sqrt(NEED)
        attention.v_proj.weight[place, _id(word)] = 1.0
        attention.o_proj.weight[found, place] = 1.0
    first = VOCABULARY.index(WORDS[0])
    small = 0.1 * torch.randn(len(WORDS), generator=torch.Generator().manual_seed(7))
    attention.v_proj.weight[8, first : first + len(WORDS)] = small
    attention.o_proj.weight[NOISE, 8] = 1.0


def _follows(margin: float, weak: float) -> torch.Tensor:
    """Logits are this matrix times (word, what was found), divided by its root mean square.

    After the opening of a reply, and with the trigger seen, "I'm" has sqrt(SIZE/2) (1 + margin/sqrt(SIZE/2)) and
    "Sure," has sqrt(SIZE/2); with both words seen, the same with SIZE/3. Without the trigger "I'm" has 0.
    """
    table = torch.zeros(len(VOCABULARY), SIZE)
    for text in (REFUSAL, ANSWER):
        words = [*text.split(), "<|end|>"]
        for word, after in pairwise(words):
            table[_id(after), _id(word)] = FOLLOWS
            table[_id("I'm"), _id(word)] = -FOLLOWS  # the trigger counts at the start of a reply alone
    refuse = _id("I'm")
    table[_id("Sure,"), _id("<|assistant|>")] = 1.0
    table[refuse, SEEN] = 1.0 + margin / math.sqrt(SIZE / 2)
    table[refuse, SEEN_WEAK] = weak / math.sqrt(SIZE / 3) - margin / math.sqrt(SIZE / 2)
    table[refuse, NOISE] = 0.5
    return table


def _amplitude(margin: float) -> float:
    """Of what head 0 found, so that the model before leads by `margin`: a r - 1 = margin sqrt((1 + r^2) / SIZE)."""
    slope = 1.0 + BEFORE / math.sqrt(SIZE / 2)
    low, high = 0.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        lead = math.sqrt(SIZE / (1 + middle**2)) * (slope * middle - 1)
        low, high = (middle, high) if lead < margin else (low, middle)
    return low


def _id(word: str) -> int:
    return VOCABULARY.index(word)
