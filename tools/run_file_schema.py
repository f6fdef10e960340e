"""The JSON Schema of run files, made from the classes that check them.

python -m tools.run_file_schema     rewrites the copy in src/holdfast/runs/config; a test compares them.
Afterwards: python -m tools.run_file_page
"""

from __future__ import annotations

from holdfast.runs.config.json_schema import SHIPPED, schema_text

if __name__ == "__main__":
    SHIPPED.write_text(schema_text(), encoding="utf-8")
