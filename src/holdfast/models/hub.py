"""Asking the hub once, with a deadline, before anything is downloaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.models.library_errors import one_line_errors

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


def reachable(repository: str, revision: str | None) -> bool:
    """Whether the hub can be asked for this model; if not, only files in the local hub cache can be used.

    Without this question, a machine that has no route to the hub retries for a minute per model. Offline mode
    (`HF_HUB_OFFLINE`) and mirrors (`HF_ENDPOINT`) are honoured.

    Raises:
        ConfigError: the hub answers that there is no such model or revision, or that access is denied.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(repository, revision=revision, timeout=_TIMEOUT_S)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(
            f"model {repository!r}, revision {revision or 'main'!r}: no such model on the hub, or no access",
            remedy="check the name and revision; for a gated model accept its terms and run: hf auth login",
        ) from error
    except Exception as error:  # noqa: BLE001  (transport errors belong to the hub client's HTTP library)
        logger.warning("the hub does not answer (%s): using the local hub cache", type(error).__name__)
        return False
    return True


def cached_folder(repository: str, revision: str | None) -> Path:
    """The folder of a model in the local hub cache, for use while the hub is out of reach."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(str(snapshot_download(repository, revision=revision, local_files_only=True)))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {repository!r} is not in the local hub cache, and the hub is out of reach or off",
            remedy="check the network (and HF_HUB_OFFLINE), or give a local folder, or use embedded",
        ) from error
    except HFValidationError as error:
        raise ConfigError(
            f"model {repository!r} is neither a folder nor a hub id",
            remedy="give a model folder, a hub id (owner/name), or embedded",
        ) from error


def snapshot(repository: str, revision: str | None, patterns: Sequence[str], leaving_out: Sequence[str] = ()) -> Path:
    """Download files of a model that the hub can be asked for; the folder of its snapshot in the hub cache."""
    from huggingface_hub import snapshot_download

    with one_line_errors(repository, "model"):
        found = snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(leaving_out)
        )
        return Path(str(found))


def holds(repository: str, revision: str | None, name: str) -> bool:
    """Whether a model that the hub can be asked for has this file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with one_line_errors(repository, "model"):
        try:
            hf_hub_download(repository, name, revision=revision)
        except EntryNotFoundError:
            return False
        return True
