"""`axolotl train FILE`, with the random state fixed: Axolotl draws a fresh adapter before it sets its seed.

With a second argument the process kills itself as soon as that file is there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path


def die_with(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    import torch
    from axolotl.cli.train import do_cli

    if len(sys.argv) > 2:
        threading.Thread(target=die_with, args=(Path(sys.argv[2]),), daemon=True).start()
    torch.manual_seed(1)
    do_cli(sys.argv[1])
