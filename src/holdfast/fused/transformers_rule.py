"""Linear-attention mixers of transformers, with this project's gated delta rule in the place of their torch code.

Their modules call a function of their own file by its name. Where a GPU kernel for the rule is installed, that function
leads to the kernel and is left alone. So is a call with states before or after, boundaries of packed rows, another
chunk size, or keys and queries that are normalised already; further arguments mean nothing to the rule, there as here.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from holdfast.fused.delta_rule import CHUNK, gated_delta_rule

NAME = "torch_chunk_gated_delta_rule"
BOUNDARIES = ("cu_seqlens", "seq_idx")  # of packed rows; whatever else a model hands down means nothing to the rule


@contextmanager
def computed_here(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which mixers that would use transformers' own torch code for the rule use this one."""
    names = set() if _has_kernels() else {type(mixer).__module__ for mixer in mixers} & sys.modules.keys()
    homes = {name: sys.modules[name] for name in names}
    before = {name: vars(home)[NAME] for name, home in homes.items() if NAME in vars(home)}
    try:
        for name, own in before.items():
            setattr(homes[name], NAME, _in_place_of(own))
        yield
    finally:
        for name, own in before.items():
            setattr(homes[name], NAME, own)


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
