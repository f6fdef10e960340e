"""Nothing in the package reads or writes a pickle: loading a checkpoint must not be able to run code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "torch.jit.save",
    "numpy.load",
    "np.load",
    "numpy.save",
    "np.save",
}


def offences(text: str) -> list[str]:
    """Imports and uses of a pickling module or function, as `line: name`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = [name for name in full if name.split(".")[0] in MODULES or name in CALLS]
        elif isinstance(node, ast.Attribute):
            names = [name for name in [ast.unparse(node)] if name in CALLS]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            names = ["allow_pickle"]
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in names]
    return found


def test_the_package_uses_no_pickle():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 50
    found = {str(path.relative_to(SOURCE)): offences(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "import torch\ntorch.load('x')", "from torch import save", "from pickle import loads",
        "import numpy as np\nnp.load('x', allow_pickle=True)", "def f():\n    import dill",
        "import torch\nread = torch.load",
    ],
)  # fmt: skip
def test_the_search_finds(text):
    assert offences(text)


@pytest.mark.parametrize(
    "text", ["from safetensors.torch import load_file, save", "store.load('x')", "# torch.load\n'torch.save'"]
)
def test_the_search_passes(text):
    assert not offences(text)
