"""`result.json` and `config.yaml` of a run, bound to each other, and the folders of its safety sets.

`result.json` is the root of a finished run. It holds its own sha256, that of the bytes of `config.yaml`, that of the
settings themselves (without `output_dir`, so that a run can be found again under another name) and the sha256 of
every audit that training wrote. `events.jsonl` is a log that grows row by row and is cut when a run resumes: no
verdict rests on it, so it carries no checksum.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError
from holdfast.core.files import read_plain_file
from holdfast.core.hashing import same_numbers, sha256_file, sha256_json
from holdfast.core.sealed_json import read_sealed, write_sealed
from holdfast.records.result_values import ResultValues
from holdfast.records.yaml_file import parse_stored_yaml

RESULT_NAME, CONFIG_NAME = "result.json", "config.yaml"
SINGLE = "safety"
"""The name of a safety set that was given none; its files lie in the run folder itself."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"
RESERVED = frozenset({"adapter", "checkpoints", "model", "constraint", "monitor", "certify", "screening"})
"""Names that a safety set cannot have: those of other things in the run folder, and of the roles."""
_RESTORE = "restore the file from a backup, or train again into another output_dir"


def settings_sha256(values: Mapping[str, object]) -> str:
    """Hash of resolved settings without `output_dir`, so that a run folder may be moved."""
    return sha256_json(same_numbers({key: value for key, value in values.items() if key != "output_dir"}))


def write_result(folder: Path, values: ResultValues) -> ResultValues:
    """Write the result of a run, bound to the `config.yaml` beside it; its presence says that the run is finished.

    Returns what was written, checksums included.
    """
    config = folder / CONFIG_NAME
    if config.is_file():
        values = {**values, "config_file_sha256": sha256_file(config)}
    return {**values, "sha256": write_sealed(folder / RESULT_NAME, values)}


def read_result(folder: Path) -> dict[str, Any]:
    """The result of a finished run; refused where a file is damaged, or `config.yaml` was changed since."""
    path = folder / RESULT_NAME
    values = read_sealed(path, remedy=_RESTORE)
    if is_there(folder / CONFIG_NAME):
        data = read_plain_file(folder / CONFIG_NAME, remedy=_RESTORE)
        same = values.get("config_file_sha256") == sha256(data).hexdigest()
        try:
            settings = parse_stored_yaml(data, folder / CONFIG_NAME) if same else {}
            same = same and values.get("config_sha256") == settings_sha256(settings)
        except (TypeError, ValueError):  # a date, or NaN: no setting of ours
            same = False
        if not same:
            what = f"{folder / CONFIG_NAME} was changed after the run was finished: {RESULT_NAME} is of other settings"
            raise CheckpointError(what, remedy=_RESTORE)
    return values


def require_name(name: object, where: object) -> str:
    """The name of a safety set, where it is one that a run file may give."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or name in RESERVED:
        raise CheckpointError(
            f"{where} names a safety set {str(name)[:100]!r}; expected letters, digits, '-' and '_' that no other "
            "part of a run folder has for its name",
            remedy=_RESTORE,
        )
    return name


def set_folder(run: Path, name: str, *, named: bool) -> Path:
    """Where the evidence of a safety set lies: the run folder, or a folder of its own where the sets carry names."""
    require_name(name, run / CONFIG_NAME)
    return no_link(run / name) if named else run


def is_there(path: Path) -> bool:
    """Whether there is anything in this place, if only a link that leads nowhere: it is refused, not passed over."""
    return path.exists() or path.is_symlink()


def no_link(path: Path) -> Path:
    """`path`, which is not a symbolic link: evidence lies in the folder that was named, or nowhere."""
    if path.is_symlink():
        what = f"{path} is a symbolic link, which is not followed"
        raise CheckpointError(what, remedy="put the files themselves there, or name the folder that it points to")
    return path
