"""The data that a picture of ours carries with it: what was plotted, panel by panel."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from holdfast_lab.tables import canvas


def plotted_data(path: Path) -> list[dict[str, Any]]:
    """Lines and bars of every panel, as `holdfast_lab.tables.canvas.plotted` wrote them into the file."""
    with Image.open(path) as image:
        return list(json.loads(image.text["Description"]))  # type: ignore[attr-defined]


def without_vectors(monkeypatch: Any) -> None:
    """A page has pictures of pixels: the same ones as vectors are not drawn."""
    drawn = canvas._bytes
    monkeypatch.setattr(
        canvas, "_bytes", lambda figure, form, data: b"" if form == "svg" else drawn(figure, form, data)
    )


def with_their_data_alone(monkeypatch: Any) -> None:
    """Pictures of one pixel, with the data of the whole picture."""

    def written(figure: Any, form: str, metadata: dict[str, Any]) -> bytes:
        out, data = io.BytesIO(), PngImagePlugin.PngInfo()
        for name, text in metadata.items():
            if text is not None:
                data.add_text(name, text)
        Image.new("1", (1, 1)).save(out, "png", pnginfo=data)
        return out.getvalue()

    monkeypatch.setattr(canvas, "_bytes", written)
