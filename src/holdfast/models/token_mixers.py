"""Token mixers: the modules of a decoder block through which its positions exchange information, found by role.

Softmax attention in most models; linear attention, a state-space module or a short convolution in hybrids. Every block
must have at least one: a method that acts on "the attention of every block" would otherwise silently skip some.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from holdfast.core.errors import UnsupportedError
from holdfast.core.library_types import LanguageModel

# Names under which blocks of transformers models hold them: attention; state-space, recurrent and convolutional blocks.
_ATTENTION = {"self_attn", "self_attention", "attention", "attn", "linear_attn"}
ROLES = _ATTENTION | {"mamba", "mixer", "mlstm_layer", "temporal_block", "conv"}
FEED_FORWARD = ("MLP", "MoE")  # Nemotron-H calls these a mixer too

Mixers = Sequence[tuple[str, nn.Module]]


def token_mixers(model: LanguageModel) -> list[tuple[str, nn.Module]]:
    """Name (in the model without PEFT's wrapper) and module of every token mixer of the language model, in order.

    A block with two of them side by side (Falcon-H1) gives both.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = type(inner).__name__
    found = []
    for position, block in enumerate(_blocks(inner)):
        children = [child for name, child in block.named_children() if name in ROLES]
        mixers = [child for child in children if not type(child).__name__.endswith(FEED_FORWARD)]
        if not mixers:
            what = f"block {position} of {kind} ({type(block).__name__}) has no token mixer"
            raise UnsupportedError(what, remedy=f"use a model whose every block has one of {', '.join(sorted(ROLES))}")
        found += mixers
    if len({id(mixer) for mixer in found}) != len(found):
        what = f"blocks of {kind} share a token mixer"
        raise UnsupportedError(what, remedy="use a model whose blocks have their own")
    names = {id(module): name for name, module in inner.named_modules()}
    return [(names[id(mixer)], mixer) for mixer in found]


def _blocks(inner: LanguageModel) -> nn.ModuleList:
    """The decoder blocks of the language tower: the outermost list of as many modules as the text model has layers."""
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    config = getattr(inner, "config", None)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None) if config is not None else None
    lists = [(name, module) for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    if not (lists := [(name, module) for name, module in lists if len(module) == layers]):
        what = f"no list of {layers} decoder blocks in {type(inner).__name__}"
        raise UnsupportedError(what, remedy="use a decoder-only language model of transformers")
    return min(lists, key=lambda found: found[0].count("."))[1]


@contextmanager
def shifted(mixers: Mixers, shift: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """A context in which `shift(name, hidden)` is added to each mixer's output `hidden` (rows, positions, width).

    It must enclose the backward too: gradient checkpointing runs the layers again there.
    """

    def hook(name: str) -> Callable[..., Any]:
        def add(_module: nn.Module, _arguments: object, output: Any) -> Any:
            # The output is the hidden states, or a tuple of which they are the first.
            if isinstance(output, Tensor):
                return output + shift(name, output)
            return (output[0] + shift(name, output[0]), *output[1:])

        return add

    with ExitStack() as hooks:
        for name, module in mixers:
            hooks.callback(module.register_forward_hook(hook(name)).remove)
        yield
