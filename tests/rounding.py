"""How closely float32 sums taken in two orders agree on this CPU.

1e-6 was seen to hold on CPUs with bfloat16 instructions, whose libraries sum alike whatever the batch. Without them it
does not: on a Neoverse-N1 the first release is off by 1.28e-6 (fused step, two safety sets) and 1.07e-6 (FSDP2, kl), on
an x86-64 with AVX-512 alone the present one by 1.29e-6 (DDP, all weights).
"""

from __future__ import annotations

from holdfast.models.handle import cpu_has_bfloat16

FLOAT32 = 1e-6 if cpu_has_bfloat16() else 2e-6
