"""The JSON Schema of a run file, for editors that complete keys and underline mistakes.

`holdfast init` writes it beside the run file. `python -m tools.run_file_schema` makes it from the classes that check
run files; what it cannot say (settings that exclude one another, files that must exist) `holdfast check` reports.
"""

from pathlib import Path

FILE_NAME = "run-file.schema.json"
SHIPPED = Path(__file__).with_name(FILE_NAME)
EDITOR_COMMENT = f"# yaml-language-server: $schema={FILE_NAME}"
"""The line by which editors with the YAML language server find the schema beside the file."""


def shipped_schema() -> str:
    """The schema's file, as it is in the package."""
    return SHIPPED.read_text(encoding="utf-8")
