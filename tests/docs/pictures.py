"""The data that a picture of ours carries with it: what was plotted, panel by panel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image


def plotted_data(path: Path) -> list[dict[str, Any]]:
    """Lines and bars of every panel, as `holdfast_lab.tables.canvas.plotted` wrote them into the file."""
    with Image.open(path) as image:
        return list(json.loads(image.text["Description"]))  # type: ignore[attr-defined]
