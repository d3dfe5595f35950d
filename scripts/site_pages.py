"""A hook of mkdocs: pages of the site from elsewhere in the repository, links to them, and tables of options."""

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {  # file of the repository -> page
    "README.md": "index.md",
    "ldm_lite/core/README.md": "core.md",
    "weights/README.md": "weights.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        text = with_links((ROOT / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fix the links of a page in docs/, and replace lines `options: module.Class` by tables."""
    if page.file.src_uri in PAGES.values():
        return markdown
    tables = re.sub(
        r"^options: ([\w.]+)\.(\w+)$", lambda match: options_table(*match.groups()), markdown, flags=re.MULTILINE
    )
    return with_links(tables, f"docs/{page.file.src_uri}")


def options_table(module: str, name: str) -> str:
    """Return a table of the options that a class itself declares, with defaults and help."""
    kind = getattr(importlib.import_module(module), name)
    lines = [kind.__doc__.strip(), "", "| option | default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        if field.name in kind.__annotations__:
            about = field.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| `{field.name}` | `{field.default!r}` | {about} |")
    return "\n".join(lines)


def with_links(text: str, source: str) -> str:
    """Return the text of a file with its links to other files of the repository as links of the site."""
    folder = (ROOT / source).parent

    def place(match: re.Match[str]) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target or not target:
            return match[0]
        path = (folder / target).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else target
        if name in PAGES:
            return f"{before}{PAGES[name]}{anchor}"
        return f"{before}{name.removeprefix('docs/')}{anchor}" if name.startswith("docs/") else match[0]

    return re.sub(r"""(\]\(|src=")([^)"#\s]*)(#[^)"\s]*)?""", place, text)
