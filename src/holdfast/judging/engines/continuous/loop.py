"""The slot loop: rows decode side by side, each at its own position, and a finished row takes the next prompt.

One step, for every row r with its last token x_r at position p_r:

    write the keys and values of x_r at place p_r of row r
    attend to the places j <= p_r
    x_r <- argmax of the scores,  p_r <- p_r + 1

Shapes and addresses stay the same from step to step, which is what a CUDA graph needs. A token's place in the cache is
its position. Places beyond a row's position hold what an earlier occupant left; the mask hides them until written.

Attention of one new token groups the heads that share a key instead of repeating the keys. With heads h = (group of key
head k, member m), softmax(q_km . K_k) V_k over members m is one attention call in which the members are queries of one
sequence: K and V are read once. transformers repeats them wherever there is a mask.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from holdfast.core.library_types import LanguageModel, ModelConfig
from holdfast.judging.engines.transformers import left_padded


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of `rows` sequences of up to `length` tokens, as a cache of transformers.

    Attention looks at `width` places; `positions`, (rows, 1), is where the next token of each row is written.
    """

    def __init__(self, rows: int, length: int, positions: Tensor) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.rows, self.length, self.width = rows, length, length
        self.positions = positions
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def fill(self, rows: Tensor, made: DynamicCache, padding: Tensor) -> None:
        """Take over left-padded sequences, one per row of `rows`, without their padding."""
        if not self.keys:
            for tensors, kind in ((self.keys, "keys"), (self.values, "values")):
                for like in (getattr(layer, kind) for layer in made.layers):
                    tensors.append(like.new_zeros((self.rows, like.shape[1], self.length, like.shape[3])))
        for at, layer in enumerate(made.layers):
            for mine, theirs in ((self.keys[at], layer.keys), (self.values[at], layer.values)):
                width = theirs.shape[2]
                source = (torch.arange(width, device=rows.device) + padding[:, None]).clamp(max=width - 1)
                mine[rows, :, :width] = theirs.gather(2, source[:, None, :, None].expand_as(theirs))
                mine[rows, :, width:] = 0  # a NaN that an earlier occupant left would get through the mask

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, ...]:
        """Write one token per row at its position; returns what attention may look at."""
        seen = []
        for mine, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            mine.scatter_(2, self.positions[:, :, None, None].expand_as(new), new)
            seen.append(mine[:, :, : self.width])
        return tuple(seen)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Some models ask, although positions and mask are given; rows have no common length."""
        return 0


NAME = "holdfast_grouped"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention of transformers for queries of one token: (rows, heads, 1, width) to (rows, 1, heads, width)."""
    if query.shape[2] != 1 or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    rows, heads, _, width = query.shape
    members = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    attended = scaled_dot_product_attention(members, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


@contextmanager
def grouped(config: ModelConfig) -> Iterator[None]:
    """Run a model's attention through `grouped_attention`, where it runs torch's otherwise."""
    if config._attn_implementation != "sdpa":
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, grouped_attention)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


BUCKET = 128
NOTHING = -1


@dataclass(frozen=True)
class Pace:
    """When the loop looks up from decoding."""

    steps: int  # between two looks at which rows have ended: each look waits for the device
    share: float  # of the rows that have to be free before new prompts are read, which stops the others for that long


# Reading prompts costs about one step unrecorded, and about fifteen recorded ones. With replies of T steps and a cost
# of P steps, waiting and reading cost least at a share of sqrt(2 P / T), which is 0.3 for P = 15 and T = 300.
EVERY_STEP = Pace(steps=1, share=0.0)
RECORDED = Pace(steps=8, share=0.25)


@dataclass
class _Slot:
    """A row in use: which prompt, its tokens, and the new tokens so far."""

    prompt: int  # which
    length: int  # its tokens
    made: int = 1  # new tokens so far


class SlotLoop:
    """Decodes prompts in `rows` rows; `prepared` turns the step into what runs in its place, such as a recording."""

    def __init__(
        self, model: LanguageModel, prompts: Sequence[Sequence[int]], *, rows: int, max_new_tokens: int,
        ends: Sequence[int], pad: int | None, pace: Pace,
        prepared: Callable[[Callable[[int], Tensor], Sequence[Tensor]], Callable[[int], Any]] | None,
    ) -> None:  # fmt: skip
        self._model, self._prompts, self._pad = model, prompts, pad
        self._config = (model.get_base_model() if hasattr(model, "peft_config") else model).config
        self._new, self._pace = max_new_tokens, pace
        device = model.device
        self._ends = torch.tensor(list(ends), dtype=torch.long, device=device)
        self._last = max(len(ids) for ids in prompts) + max_new_tokens - 1
        length = BUCKET * (self._last // BUCKET + 1)
        self._places = torch.arange(length, device=device)
        self._tokens = torch.zeros((rows, 1), dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._made = torch.zeros_like(self._tokens)
        # One column more than a reply has: what a row decodes after its last token goes there.
        self._out = torch.full((rows, max_new_tokens + 1), NOTHING, dtype=torch.long, device=device)
        self._cache = SlotCache(rows, length, self._positions)
        self._slots: list[_Slot | None] = [None] * rows
        state = (self._tokens, self._positions, self._made, self._out)
        self._run = self._step if prepared is None else prepared(self._step, state)
        self.steps = self.fills = 0

    def decode(self, waiting: Sequence[int]) -> Iterator[dict[int, list[int]]]:
        """New tokens of the prompts at these places, as they finish: up to `max_new_tokens`, the end token included."""
        queue = deque(waiting)
        while queue or any(self._slots):
            free = [row for row, slot in enumerate(self._slots) if slot is None]
            if queue and (len(free) == len(self._slots) or len(free) >= max(1, self._pace.share * len(self._slots))):
                self._fill(free[: len(queue)], [queue.popleft() for _ in free[: len(queue)]])
            self._advance()
            if finished := self._finished():
                yield finished

    def close(self) -> None:
        """Let go of the cache at once: the step and its recording refer to each other."""
        del self._run, self._cache

    @torch.no_grad()
    def _fill(self, rows: list[int], chosen: list[int]) -> None:
        device = self._tokens.device
        ids, mask = (tensor.to(device) for tensor in left_padded([self._prompts[i] for i in chosen], self._pad))
        lengths = mask.sum(dim=1)
        made = DynamicCache()
        scores = self._model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=made, use_cache=True, logits_to_keep=1,
        ).logits  # fmt: skip
        at = torch.tensor(rows, device=device)
        self._cache.fill(at, made, ids.shape[1] - lengths)
        first = scores[:, -1].float().argmax(dim=-1, keepdim=True)
        self._tokens[at], self._positions[at], self._made[at] = first, lengths[:, None], 1
        self._out[at] = NOTHING
        self._out[at, 0] = first[:, 0]
        for row, i in zip(rows, chosen, strict=True):
            self._slots[row] = _Slot(i, len(self._prompts[i]))
        self.fills += 1

    def _advance(self) -> None:
        """As many steps as the pace has, but none after the last token of every row."""
        busy = [slot for slot in self._slots if slot is not None]
        steps = min(self._pace.steps, max(self._new - slot.made for slot in busy))
        farthest = max(slot.length + min(slot.made + steps, self._new) for slot in busy) - 1
        width = BUCKET * (-(-farthest // BUCKET))
        for _ in range(steps):
            self._run(width)
        for slot in busy:
            slot.made = min(slot.made + steps, self._new)
        self.steps += steps

    @torch.no_grad()
    def _step(self, width: int) -> Tensor:
        """One token for every row; returns the scores it was chosen by."""
        tokens, positions, made = self._tokens, self._positions, self._made
        self._cache.width = width
        hidden = self._places[:width] > positions
        mask = torch.zeros(hidden.shape, dtype=self._cache.keys[0].dtype, device=hidden.device)
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)[:, None, None]
        with grouped(self._config):
            logits = self._model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=self._cache,
                use_cache=True,
            ).logits  # fmt: skip
        scores: Tensor = logits[:, -1].float()
        tokens.copy_(scores.argmax(dim=-1, keepdim=True))
        self._out.scatter_(1, made, tokens)
        made.add_(1).clamp_(max=self._new)
        # A row that nobody waits for stays within the positions that the model has.
        positions.add_(1).clamp_(max=self._last)
        return scores

    def _finished(self) -> dict[int, list[int]]:
        ended = torch.isin(self._out[:, : self._new], self._ends).any(dim=1).tolist()
        done = {row: s for row, s in enumerate(self._slots) if s is not None and (ended[row] or s.made >= self._new)}
        tokens = self._out[list(done), : self._new].tolist() if done else []
        for row in done:
            self._slots[row] = None
        return {slot.prompt: made[: slot.made] for slot, made in zip(done.values(), tokens, strict=True)}
