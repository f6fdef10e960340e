"""The package as text: modules, what each imports, how long its functions are. Nothing is executed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


@cache
def modules(root: Path = SOURCE) -> dict[str, ast.Module]:
    """Module name to syntax tree, for every file of both packages."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@cache
def imports(tree: ast.AST) -> frozenset[str]:
    """Every module imported anywhere in the file, `if TYPE_CHECKING` included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def layer(module: str) -> str:
    """`holdfast.constraint.filter` -> `constraint`, `holdfast_lab.study.cell` -> `lab.study`.

    The packages' own files are `holdfast` and `lab`.
    """
    package, *rest = module.split(".")
    if package == "holdfast_lab":
        return ".".join(["lab", *rest[:1]])
    return rest[0] if rest else package


def function_lengths(tree: ast.AST) -> dict[str, int]:
    """Lines of every function without its docstring."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = node.body[0] if ast.get_docstring(node) else None
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if doc is not None and doc.end_lineno is not None:
                lines -= doc.end_lineno - doc.lineno + 1
            found[f"{node.name}:{node.lineno}"] = lines
    return found
