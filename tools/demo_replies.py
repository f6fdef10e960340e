"""Records what the demo's aligned model replies while a task is screened: `python -m tools.demo_replies [FILE]`.

`holdfast demo --fast` reads these replies and does not ask. The first line of the file says what made them. The prompts
are the demo's own and mild; several minutes on two cores.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.demo.data import RECORDED, DemoSettings, load_data
from holdfast.demo.story import ALIGNED_DIR, TEMPLATE, screened
from holdfast.models.handle import load_pair
from holdfast.screening.asking import SORTING


def record(path: Path) -> None:
    """Ask the aligned model, in float32, all that the whole demo asks, and keep its replies."""
    model, tokenizer = load_pair(ALIGNED_DIR, dtype="float32")
    tokenizer.chat_template = TEMPLATE
    settings = DemoSettings()
    with tempfile.TemporaryDirectory() as folder:
        screened(model, tokenizer, load_data(settings), settings, None, replies=Path(folder))
        (made,) = Path(folder).glob("*/*.jsonl")  # a second file would hold replies that 32 tokens do not end
        if made.name != f"{SORTING}.jsonl":
            raise SystemExit(f"{made.name}: expected replies of {SORTING} tokens alone")
        shutil.copyfile(made, path)


def main(arguments: Sequence[str]) -> None:
    """Record the replies."""
    record(Path(arguments[0]) if arguments else RECORDED)


if __name__ == "__main__":
    main(sys.argv[1:])
