"""How closely float32 sums taken in two orders agree on this CPU.

1e-6 was seen to hold on CPUs with bfloat16 instructions, whose libraries sum alike whatever the batch. On one without
them (Neoverse-N1) the first release is off by 1.28e-6 (fused step, two safety sets) and 1.07e-6 (FSDP2, kl).
"""

from __future__ import annotations

import torch

HAS_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
FLOAT32 = 1e-6 if HAS_BFLOAT16 else 2e-6
