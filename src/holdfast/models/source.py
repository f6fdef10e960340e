"""Where a model is: a folder, a hub id or the embedded default; found out without torch.

The hub is asked once, with a deadline, before anything is downloaded.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import ConfigError
from holdfast.models.embedded import embedded_model_dir
from holdfast.models.library_errors import one_line_errors
from holdfast.models.model_files import CODE, DECISIVE, INDEX, SECOND_COPIES

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
TIMEOUT_S = 5.0  # of the one question
MAX_ID = 300  # characters; the hub takes fewer
_GIVE = "give a model folder, a hub id (owner/name), or embedded"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


class Source(NamedTuple):
    """Where a model is: a local folder, or a hub id with what to ask the hub for."""

    place: str
    revision: str | None = None


def resolve(ref: str | Path, revision: str | None, trust_remote_code: bool, local_only: bool = False) -> Source:
    """A local folder or a hub id; refuses what is neither. `local_only` asks the hub nothing: its cache has to do."""
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
        raise ConfigError(f"model {shown!r}: {found}", remedy=_GIVE)
    if local_only:  # files are hashed, and no code of theirs runs
        return Source(str(cached_folder(text, revision, "and the hub was not asked")))
    if trust_remote_code and not _COMMIT.fullmatch(revision or ""):
        what = f"model {text!r}: trust_remote_code needs a pinned commit, found revision {revision!r}"
        raise ConfigError(what, remedy="set revision to the 40-digit commit whose code you have read")
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


def reachable(repository: str, revision: str | None) -> bool:
    """Whether the hub can be asked for this model; if not, only files in the local hub cache can be used.

    Without this question, a machine that has no route to the hub retries for a minute per model. Offline mode
    (`HF_HUB_OFFLINE`) and mirrors (`HF_ENDPOINT`) are honoured.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(repository, revision=revision, timeout=TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = f"model {repository!r}, revision {revision or 'main'!r}: no such model on the hub, or no access"
        remedy = "check the name and revision; for a gated model accept its terms and run: hf auth login"
        raise ConfigError(what, remedy=remedy) from error
    except Exception as error:  # noqa: BLE001  (transport errors belong to the hub client's HTTP library)
        logger.warning("the hub does not answer (%s): using the local hub cache", type(error).__name__)
        return False
    return True


def cached_folder(repository: str, revision: str | None, otherwise: str = "and the hub is out of reach or off") -> Path:
    """The folder of a model in the local hub cache, for use while the hub is out of reach."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(str(snapshot_download(repository, revision=revision, local_files_only=True)))
    except LocalEntryNotFoundError as error:
        what = f"model {repository!r} is not in the local hub cache, {otherwise}"
        remedy = "check the network (and HF_HUB_OFFLINE), or give a local folder, or use embedded"
        raise ConfigError(what, remedy=remedy) from error
    except HFValidationError as error:
        what = f"model {repository!r} is neither a folder nor a hub id"
        raise ConfigError(what, remedy=_GIVE) from error


def snapshot(repository: str, revision: str | None, patterns: Sequence[str], leaving_out: Sequence[str] = ()) -> Path:
    """Download files of a model that the hub can be asked for; the folder of its snapshot in the hub cache."""
    from huggingface_hub import snapshot_download

    with one_line_errors(repository, "model"):
        chosen: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(leaving_out)}
        return Path(str(snapshot_download(repository, revision=revision, **chosen)))


def file_of(source: Source, name: str) -> Path | None:
    """One file of a model's folder, or of its hub repository; None where it has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    folder = Path(source.place)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    with one_line_errors(source.place, "model"):
        try:
            return Path(hf_hub_download(source.place, name, revision=source.revision))
        except EntryNotFoundError:
            return None
