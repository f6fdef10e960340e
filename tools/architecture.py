"""Draws docs/architecture.md's diagram from the imports: `python -m tools.architecture [docs/architecture.md]`.

One node per package, one arrow per import between packages; an arrow that a longer path implies is left out.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- diagram -->\n", "<!-- end -->"


def package_of(module: str) -> str | None:
    """`holdfast.constraint.filter` -> `constraint`, `holdfast_lab.study.cell` -> `lab.study`; None elsewhere."""
    root, *rest = module.split(".")
    if root not in ("holdfast", "holdfast_lab") or not rest:
        return None
    return rest[0] if root == "holdfast" else f"lab.{rest[0]}"


def edges(source: Path = ROOT / "src") -> dict[str, set[str]]:
    """Package to the packages it imports, anywhere in its files."""
    found: dict[str, set[str]] = {}
    for path in source.rglob("*.py"):
        own = package_of(".".join(path.relative_to(source).with_suffix("").parts))
        if own is None or own.startswith("__") or own.endswith(".__init__"):
            continue
        below = found.setdefault(own, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            below |= {target for name in names if (target := package_of(name)) not in (None, own)}
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same order with the fewest arrows (transitive reduction of an acyclic graph)."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        return seen

    far = {node: set().union(*(reach(below) for below in graph[node])) if graph[node] else set() for node in graph}
    return {node: graph[node] - far[node] for node in graph}


def diagram() -> str:
    """Mermaid text."""
    graph = reduced(edges())
    lines = ["```mermaid", "flowchart TD", "  subgraph holdfast"]
    lines += [f"    {node}" for node in sorted(graph) if not node.startswith("lab.")]
    lines += ["  end", "  subgraph holdfast_lab"]
    lines += [f"    {node}" for node in sorted(graph) if node.startswith("lab.")]
    lines += ["  end", *(f"  {node} --> {below}" for node in sorted(graph) for below in sorted(graph[node])), "```"]
    return "\n".join(lines) + "\n"


def rewritten(page: str) -> str:
    """The page with its diagram drawn anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{diagram()}{END}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
