"""A hook of hatchling: the page that a package index shows.

In a workflow of GitHub, which says where the repository is, links and pictures of the README become absolute, and the
package gets its addresses.  Elsewhere the README stays as it is.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ModuleNotFoundError:  # the tests' environment, which builds nothing
    MetadataHookInterface = object

PAGES = {"Source": "", "Documentation": "tree/main/docs", "Changes": "blob/main/CHANGELOG.md", "Issues": "issues"}


class PackagePage(MetadataHookInterface):
    """Fills in the project's fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Change the metadata in place."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = repository(os.environ)
        pages = {} if address is None else {name: f"{address}/{path}" for name, path in PAGES.items()}
        metadata["urls"] = pages
        metadata["readme"] = {"content-type": "text/markdown", "text": with_addresses(text, address)}


def repository(environment: Mapping[str, str]) -> str | None:
    """Return the repository's address, if a workflow gives it."""
    name = environment.get("GITHUB_REPOSITORY")
    return f"{environment.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else None


def with_addresses(text: str, address: str | None) -> str:
    """Return a page with its relative links and pictures as addresses."""
    if address is None:
        return text
    text = re.sub(r'src="(?![a-z]+:)([^"]+)"', rf'src="{address}/raw/main/\1"', text)
    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", rf"]({address}/blob/main/\1)", text)
