"""What MkDocs does besides (mkdocs.yml): pages from outside docs/, and links that leave it.

README.md becomes the first page, without its list of source files; examples/README.md and CHANGELOG.md become pages
too. The run file's JSON Schema is a
file of the site, for editors. A link to a file of the repository that is no page turns into its text and path, since
the site has no copy of it. The diagram of the packages, which only GitHub draws, turns into a table.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"index.md": "README.md", "examples.md": "examples/README.md", "changelog.md": "CHANGELOG.md"}
FILES = {
    "benchmarks/results/speed.png": "benchmarks/results/speed.png",
    "benchmarks/results/sweeps.png": "benchmarks/results/sweeps.png",
    "run-file.schema.json": "src/holdfast/runs/config/run-file.schema.json",
}
"""Place on the site -> file of the repository."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
FENCED = re.compile(r"^```.*?^```", flags=re.M | re.S)
SEARCH = 'data-md-component="search" role="dialog" aria-label="Search"'
SOURCES = re.compile(r"^To read the code, .*?\n\n", flags=re.M | re.S)
DIAGRAM = re.compile(r"```mermaid\n(.*?)```", flags=re.S)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages, pictures and the run file's schema, which lie outside docs/."""
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == "README.md":
            text, found = SOURCES.subn("", text)
            if not found:
                raise PluginError("README.md: no paragraph `To read the code, ...`, which the site leaves out")
        files.append(File.generated(config, name, content=_relinked(text, Path(source).parent)))
    for name, source in FILES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links of a page of docs/ that lead out of it, and the diagram."""
    if page.file.src_uri in PAGES:
        return markdown
    markdown = DIAGRAM.sub(lambda block: _table(block[1]), markdown)
    return _relinked(markdown, Path("docs") / Path(page.file.src_uri).parent, page.file.src_uri)


def on_post_page(output: str, **_: Any) -> str:
    """The theme's search is a dialog without a name; screen readers need one."""
    return output.replace('data-md-component="search" role="dialog"', SEARCH)


def on_post_template(output: str, **_: Any) -> str:
    """404.html, which is no page to MkDocs, has the same search."""
    return on_post_page(output)


def _relinked(text: str, folder: Path, page: str = "index.md") -> str:
    """`text`, a page of `folder`, with links as the site's `page` needs them; code is left alone."""
    fenced = FENCED.findall(text)
    parts = FENCED.split(text)
    made = [LINK.sub(lambda link: _link(link, folder, page), part) for part in parts]
    return "".join(part + block for part, block in zip(made, [*fenced, ""], strict=True))


def _link(link: re.Match[str], folder: Path, page: str) -> str:
    mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    path = posixpath.normpath((folder / target).as_posix())
    own = {source: name for name, source in (PAGES | FILES).items()}
    if path in own:
        inside = own[path]
    elif path.startswith("docs/"):
        inside = path.removeprefix("docs/")
    else:
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
    return f"{mark}[{text}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{anchor})"


def _table(diagram: str) -> str:
    """Which package imports which, as rows."""
    arrows: dict[str, list[str]] = {}
    for start, end in re.findall(r"(\S+) --> (\S+)", diagram):
        arrows.setdefault(start, []).append(f"`{end}`")
    rows = [f"| `{name}` | {', '.join(others)} |" for name, others in arrows.items()]
    return "\n".join(["| package | imports |", "|---|---|", *rows])
