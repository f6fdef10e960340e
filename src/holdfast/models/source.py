"""Where a model is: a folder, a hub id or the embedded default; found out without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from holdfast.core.errors import ConfigError
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.hub import cached_folder, reachable, snapshot
from holdfast.models.model_files import CODE, DECISIVE, INDEX, SECOND_COPIES

EMBEDDED = "embedded"
MAX_ID = 300  # characters; the hub takes fewer
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


class Source(NamedTuple):
    """Where a model is: a local folder, or a hub id with what to ask the hub for."""

    place: str
    revision: str | None = None


def resolve(ref: str | Path, revision: str | None, trust_remote_code: bool) -> Source:
    """A local folder or a hub id; refuses what is neither."""
    text = str(ref)
    if text == EMBEDDED:
        return Source(str(embedded_model_dir()))
    folder = os.path.expanduser(text)  # noqa: PTH111  (a user that does not exist leaves the text as it is)
    if text and os.path.isdir(folder):  # noqa: PTH112  (False for names that the system cannot hold, too)
        return Source(folder)
    is_file = os.path.isfile(folder)  # noqa: PTH113
    if is_file or isinstance(ref, Path) or len(text) > MAX_ID or not _HUB_ID.fullmatch(text):
        found = "it is a file" if is_file else "there is no such folder"
        shown = text if len(text) <= MAX_ID else f"{text[:MAX_ID]}..."
        raise ConfigError(f"model {shown!r}: {found}", remedy="give a model folder, a hub id (owner/name), or embedded")
    if trust_remote_code and not _COMMIT.fullmatch(revision or ""):
        raise ConfigError(
            f"model {text!r}: trust_remote_code needs a pinned commit, found revision {revision!r}",
            remedy="set revision to the 40-digit commit whose code you have read",
        )
    if reachable(text, revision):
        return Source(text, revision)
    return Source(str(cached_folder(text, revision)))


def folder_of(source: Source, *, trust_remote_code: bool) -> Path:
    """The local folder of a full model; of a hub id its snapshot, with every file that counts downloaded.

    What is hashed and what is loaded is this one folder, whatever the hub's branch points to in between.
    """
    folder = Path(source.place)
    if folder.is_dir():
        return folder
    patterns = ["*.safetensors", INDEX, *DECISIVE, *([CODE] if trust_remote_code else [])]
    return snapshot(source.place, source.revision, patterns, leaving_out=SECOND_COPIES)
