"""The gated delta rule of linear-attention mixers (Qwen3-Next, Qwen3.5, OLMo-Hybrid), with a backward of its own.

For every head, with unit keys k_t, queries q_t of norm d^(-1/2), values v_t, rates b_t and log-decays g_t:

    S_t = e^(g_t) S_(t-1) + b_t k_t (v_t - e^(g_t) S_(t-1)^T k_t)^T        o_t = S_t^T q_t

in chunks of `CHUNK` tokens, inside which c_t is the sum of the decays so far and G_ij = e^(c_i - c_j) for i >= j:

    A = tril(b k k^T G, -1)      T = (1 + A)^(-1)      [U W] = T [b v, b e^c k]      P = q k^T G
    V = U - W S                  o = (e^c q) S + P V   S <- e^(c_last) S + (e^(c_last - c) k)^T V

transformers computes the same where flash-linear-attention is not installed, and autograd then keeps what each of its
operations needs. Here the backward is written out: little more than half of the memory and of the traffic
(docs/log.md), and products in place of a triangular solver.

`computed_here` puts it in the place of theirs, which their modules call by its name. Where a GPU kernel for the rule is
installed it is left alone, and so is a call with states before or after, boundaries of packed rows, another chunk size,
or keys and queries that are normalised already; further arguments mean nothing to the rule.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK = 64
RULE = "torch_chunk_gated_delta_rule"  # what transformers calls it
BOUNDARIES = ("cu_seqlens", "seq_idx")  # of packed rows
EPSILON = 1e-6  # under the root of the norms, as in transformers


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs of the query's dtype, as `value` (rows, tokens, heads, value width); `g` and `beta` without the last.

    `query` and `key` (rows, tokens, heads, width) are not normalised. Where they have fewer heads, each serves as many
    consecutive ones of `value`: transformers repeats them itself before 5.23.
    """
    if (shared := value.shape[2] // query.shape[2]) > 1:
        query, key = (x.repeat_interleave(shared, dim=2) for x in (query, key))
    return _Rule.apply(query, key, value, g, beta)  # type: ignore[no-any-return, no-untyped-call]


class _Rule(torch.autograd.Function):
    """The rule as one operation of autograd, which has no second derivative."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        ctx.rough = torch.is_autocast_enabled(query.device.type)
        with _products(query.device.type, ctx.rough):
            one = _Chunks.of(query, key, value, g, beta)
            out = _empty_like(query, value.shape[-1])
            kept = one.forward(_as_chunks(out))
        ctx.save_for_backward(query, key, value, g, beta, *kept)
        return out[:, : query.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        saved = ctx.saved_tensors  # once: checkpointing gives them out a single time
        inputs, kept = saved[:5], saved[5:]
        found = [_empty_like(x, x.shape[-1]) for x in inputs[:3]]
        with _products(d_out.device.type, ctx.rough):
            one = _Chunks.of(*inputs)
            d_g, d_beta = one.backward(_Kept(*kept), _chunks(d_out), [_as_chunks(x) for x in found])
        rows, tokens = d_out.shape[:2]
        small = (_rows(d, rows)[:, :tokens, :, 0].to(x.dtype) for d, x in zip((d_g, d_beta), inputs[3:], strict=True))
        return (*(x[:, :tokens] for x in found), *small)


@contextmanager
def _products(device: str, rough: bool) -> Iterator[None]:
    """Outside autocast, which would round factors to 8 bits; where it is on, products of 11 bits (TF32) will do."""
    kind = torch.backends.cuda.matmul
    before = kind.fp32_precision
    try:
        if rough:
            kind.fp32_precision = "tf32"
        with torch.autocast(device, enabled=False):
            yield
    finally:
        kind.fp32_precision = before


class _Kept(NamedTuple):
    """Of the forward, for the backward: T, P, U, W, V, and the state before every chunk but the first."""

    inverse: Tensor
    within: Tensor
    u: Tensor
    w: Tensor
    values: Tensor
    states: Tensor


@dataclass
class _Chunks:
    """What the rule needs of all chunks: tensors (chunks, rows x heads, `CHUNK`, ...), float32.

    Keys and queries stay as they came: whatever scales their rows, the norms among it, is applied to the smaller
    matrices between tokens where there is one. From `beta` to `left` there is one number a token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # rates
    norm_q: Tensor  # what makes a query's norm d^(-1/2)
    norm_k: Tensor  # and a key's one
    grown: Tensor  # e^c
    left: Tensor  # e^(c_last - c)
    ratio: Tensor  # G

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Self:
        q, k, v, b, c = (_chunks(x) for x in (query, key, value, beta.unsqueeze(-1), g.unsqueeze(-1)))
        c = c.cumsum(-2)
        upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=c.device).triu(1)
        ratio = (c - c.mT).masked_fill_(upper, float("-inf")).exp_()
        scale = float(q.shape[-1]) ** -0.5
        return cls(q, k, v, b, _inverse_norm(q) * scale, _inverse_norm(k), c.exp(), (c[..., -1:, :] - c).exp_(), ratio)

    @property
    def whole(self) -> Tensor:
        """e^(c_last)."""
        return self.grown[..., -1:, :]

    def forward(self, out: Tensor) -> _Kept:
        """Write the outputs; what the backward needs."""
        q, k, v, b = self.q, self.k, self.v, self.beta
        system = (k @ k.mT).mul_(self.ratio * (b * self.norm_k) * self.norm_k.mT).tril_(-1)
        inverse = unit_lower_inverse(system)
        within = (q @ k.mT).mul_(self.ratio * self.norm_q * self.norm_k.mT)
        u = (inverse * b.mT) @ v
        w = (inverse * (b * self.norm_k * self.grown).mT) @ k
        reading, writing = self.norm_q * self.grown, k * (self.norm_k * self.left)
        values, states = u.clone(), u.new_empty(len(u) - 1, u.shape[1], k.shape[-1], v.shape[-1])
        for n in range(len(u)):
            if n == 0:
                found = within[0] @ values[0]
            else:
                values[n].baddbmm_(w[n], states[n - 1], alpha=-1)
                found = (within[n] @ values[n]).addcmul_(q[n] @ states[n - 1], reading[n])
            out[n] = found.view_as(out[n])
            if n == 0 and len(states):
                torch.bmm(writing[0].mT, values[0], out=states[0])
            elif n < len(states):
                torch.baddbmm(states[n - 1] * self.whole[n], writing[n].mT, values[n], out=states[n])
        return _Kept(inverse, within, u, w, values, states)

    def backward(self, kept: _Kept, d_out: Tensor, into: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Write the gradients by query, key and value; those by g and beta.

        An entry (i, j) between tokens grows with c_i and shrinks with c_j, so d c comes from the entries times their
        gradients, summed by row and by column. From the products with q and k it would be the difference of numbers
        that mostly cancel, and in TF32 what is left is rounding.
        """
        q, k, v, b = self.q, self.k, self.v, self.beta
        d_q, d_writing, d_u, d_w, d_last = self._through_states(kept, d_out)
        # P = q k^T G, where keys are columns.
        d_within = d_out @ kept.values.mT
        parts = kept.within * d_within
        own = parts.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
        parts, d_within = parts.tril_(-1), d_within.mul_(self.ratio)
        # [U W] = T [b v, b e^c k] with T = (1 + A)^(-1): a solution's gradient goes to the right side and to -A.
        d_bv, d_bk = kept.inverse.mT @ d_u, kept.inverse.mT @ d_w.neg_()
        d_system = torch.baddbmm(*_flat(d_bv @ kept.u.mT, d_bk, kept.w.mT)).view_as(d_within).tril_(-1).neg_()
        rows = (k @ k.mT).mul_(self.ratio * self.norm_k * self.norm_k.mT).mul_(d_system)  # A = b k k^T G, without b
        d_system.mul_(self.ratio)

        read = _dot(d_q, q) * self.norm_q
        right, written = _dot(d_bk, k) * self.norm_k * self.grown, _dot(d_writing, k) * self.norm_k * self.left
        d_beta = rows.sum(-1, keepdim=True) + right
        both = torch.addcmul(parts, rows, b)
        row, column = both.sum(-1, keepdim=True), both.sum(-2).unsqueeze(-1)
        d_c = row - column + read + right * b - written
        d_c[..., -1:, :] += d_last
        along_q = parts.sum(-1, keepdim=True) + own + read
        along_k = column + own + d_beta * b + written

        d_q = torch.baddbmm(*_flat(d_q, d_within * self.norm_k.mT, k)).view_as(q)
        d_system.mul_(b)
        keys = (d_system * self.norm_k).mT + d_system * self.norm_k.mT  # of k k^T, where a key is row and column
        d_k = torch.baddbmm(*_flat((d_within * self.norm_q).mT @ q, keys, k)).view_as(k)
        d_k.addcmul_(d_writing, self.left).addcmul_(d_bk, b * self.grown)
        # Through the norms: d x = |x|^(-1) (d y - y (y d y)), and y = x / |x|.
        d_k.addcmul_(k, along_k * self.norm_k, value=-1)
        d_q.addcmul_(q, along_q * self.norm_q * q.shape[-1], value=-1)
        for given, scale, target in zip((d_q, d_k, d_bv), (self.norm_q, self.norm_k, b), into, strict=True):
            torch.mul(given.view_as(target), scale.view(*target.shape[:-1], 1), out=target)
        return d_c.flip(-2).cumsum(-2).flip(-2), d_beta + _dot(d_bv, v)

    def _through_states(self, kept: _Kept, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients by q (of what is read from states), e^(c_last - c) k / |k|, U, -W and c_last, in this order."""
        q, k, values, states = self.q, self.k, kept.values, kept.states
        reading, writing = q * (self.norm_q * self.grown), k * (self.norm_k * self.left)
        d_u = kept.within.mT @ d_out
        d_read, d_writing, d_w = (torch.empty_like(x) for x in (q, k, k))
        for untouched in (d_read[0], d_w[0], d_writing[-1]):  # nothing is read before the first chunk or after the last
            untouched.zero_()
        d_last = torch.zeros_like(self.whole)
        d_state: Tensor | None = None  # by the state after the chunk
        for n in reversed(range(len(q))):
            if d_state is not None:
                d_u[n].baddbmm_(writing[n], d_state)
                torch.bmm(values[n], d_state.mT, out=d_writing[n])
                d_last[n] = _whole_dot(d_writing[n], writing[n])
            if n == 0:
                continue
            state = states[n - 1]
            torch.bmm(d_out[n], state.mT, out=d_read[n])
            torch.bmm(d_u[n], state.mT, out=d_w[n])
            before = torch.baddbmm(reading[n].mT @ d_out[n], kept.w[n].mT, d_u[n], alpha=-1)
            if d_state is not None:
                d_last[n] += self.whole[n] * _whole_dot(state, d_state)
                before.addcmul_(d_state, self.whole[n])
            d_state = before
        return d_read.mul_(self.grown), d_writing, d_u, d_w, d_last


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(1 + a)^(-1) for strictly lower triangular matrices whose size is a power of two, by halves:

    [[L, 0], [B, R]]^(-1) = [[L^(-1), 0], [-R^(-1) B L^(-1), R^(-1)]]
    """
    size = a.shape[-1]
    if size == 1:
        return torch.ones_like(a)
    half = size // 2
    first, last = unit_lower_inverse(torch.stack([a[..., :half, :half], a[..., half:, half:]]))
    found = torch.zeros_like(a)
    found[..., :half, :half] = first
    found[..., half:, half:] = last
    found[..., half:, :half] = -(last @ a[..., half:, :half] @ first)
    return found


def _inverse_norm(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    found: Tensor = norm.square_().add_(EPSILON).rsqrt_()
    return found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of every token."""
    return (a * b).sum(-1, keepdim=True)


def _whole_dot(a: Tensor, b: Tensor) -> Tensor:
    """Of every matrix, (matrices, 1, 1); a product, so that nothing of the matrices' size is written."""
    return a.flatten(1).unsqueeze(1) @ b.flatten(1).unsqueeze(2)


def _flat(*tensors: Tensor) -> list[Tensor]:
    """Chunks and rows as one dimension, which `baddbmm` wants."""
    return [x.flatten(0, 1) for x in tensors]


def _chunks(x: Tensor) -> Tensor:
    """(rows, tokens, heads, width) to (chunks, rows x heads, CHUNK, width), float32; zeros fill the last chunk."""
    more = -x.shape[1] % CHUNK
    if more:
        x = nn.functional.pad(x, (0, 0, 0, 0, 0, more))
    return _as_chunks(x).to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)


def _empty_like(x: Tensor, width: int) -> Tensor:
    """(rows, whole chunks of tokens, heads, width) of x's dtype."""
    rows, tokens, heads, _ = x.shape
    return x.new_empty(rows, tokens + -tokens % CHUNK, heads, width)


def _as_chunks(x: Tensor) -> Tensor:
    """The same memory as (chunks, rows, heads, CHUNK, width)."""
    rows, tokens, heads, width = x.shape
    return x.reshape(rows, tokens // CHUNK, CHUNK, heads, width).permute(1, 0, 3, 2, 4)


def _rows(x: Tensor, rows: int) -> Tensor:
    """(chunks, rows x heads, CHUNK, width) to (rows, tokens, heads, width)."""
    return x.reshape(len(x), rows, -1, *x.shape[2:]).permute(1, 0, 3, 2, 4).flatten(1, 2)


@contextmanager
def computed_here(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which mixers that would use transformers' own torch code for the rule use this one."""
    names = set() if _has_kernels() else {type(mixer).__module__ for mixer in mixers} & sys.modules.keys()
    homes = {name: sys.modules[name] for name in names}
    before = {name: vars(home)[RULE] for name, home in homes.items() if RULE in vars(home)}
    try:
        for name, own in before.items():
            setattr(homes[name], RULE, _in_place_of(own))
        yield
    finally:
        for name, own in before.items():
            setattr(homes[name], RULE, own)


@cache
def _has_kernels() -> bool:
    """Whether transformers may find a GPU kernel for the rule, which is faster still."""
    return any(_is_installed(name) for name in ("fla", "kernels"))


def _is_installed(name: str) -> bool:
    """Whether a package can be imported; a folder of that name beside a user's script is none."""
    spec = find_spec(name)
    return spec is not None and spec.loader is not None and spec.origin is not None


def _in_place_of(own: Any) -> Any:
    def rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = CHUNK,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        whole = initial_state is None and not output_final_state and all(kwargs.get(b) is None for b in BOUNDARIES)
        if whole and use_qk_l2norm_in_kernel and chunk_size == CHUNK:
            return gated_delta_rule(query, key, value, g, beta), None
        return own(  # type: ignore[no-any-return]
            query, key, value, g=g, beta=beta, chunk_size=chunk_size, initial_state=initial_state,
            output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs,
        )  # fmt: skip

    return rule
