"""The reference's states of a fresh adapter's run, kept by packed passes with the adapter off (units of KL)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.data.encode import Encoded
from holdfast.fused.body import EagerPasses
from holdfast.fused.packed_rows import encoded_rows, scored
from holdfast.scoring.reference_states import ReferenceStates

LIMIT = 2 * 2**30  # bytes of host memory
PASS_TOKENS = 4096  # at one time on the device


def with_adapter_off(passes: EagerPasses, examples: Sequence[Encoded], device: torch.device) -> ReferenceStates:
    """Pass over all examples with the adapter off."""
    unique = {example.id: example for example in examples}
    ordered = sorted(unique.values(), key=lambda e: (len(e.input_ids), e.id))

    def states(batch: Sequence[Encoded]) -> Tensor:
        rows = [encoded_rows(batch)]
        return passes.states(rows, adapters=False).index_select(0, scored(rows)[0].at.to(device))

    return ReferenceStates.of(_batches(ordered), states, device)


def fits(examples: Sequence[Encoded], width: int, dtype: torch.dtype) -> bool:
    """Whether the states of all examples stay within `LIMIT`."""
    tokens = sum({example.id: example.n_labels for example in examples}.values())
    return tokens * width * dtype.itemsize <= LIMIT


def _batches(ordered: Sequence[Encoded]) -> list[list[Encoded]]:
    """Consecutive examples of at most `PASS_TOKENS` tokens, or a single longer one."""
    found: list[list[Encoded]] = []
    held = PASS_TOKENS + 1
    for example in ordered:
        if held + len(example.input_ids) > PASS_TOKENS:
            found.append([])
            held = 0
        found[-1].append(example)
        held += len(example.input_ids)
    return found
