"""`holdfast ls tasks`: names, summaries and headline match, without loading what only training needs."""

from __future__ import annotations

import json
import subprocess
import sys


def test_ls_lists_the_tasks(holdfast):
    code, out, _ = holdfast("ls", "tasks")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ag_news", "gsm8k", "sst2"]
    code, as_json, _ = holdfast("ls", "tasks", "--json")
    rows = json.loads(as_json)
    assert [row["name"] for row in rows] == ["ag_news", "gsm8k", "sst2"]
    assert all(row["summary"] and row["metric"] == "lenient" for row in rows)


def test_listing_the_tasks_needs_no_torch():
    code = (
        "import sys; sys.argv = ['holdfast', 'ls', 'tasks']\n"
        "from holdfast.cli.main import main\n"
        "try: main()\n"
        "finally: print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
