"""`axolotl train FILE`, with the random state fixed: Axolotl draws a fresh adapter before it sets its seed."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import torch
    from axolotl.cli.train import do_cli

    torch.manual_seed(1)
    do_cli(sys.argv[1])
