"""The project's address in a package's metadata, which is set when the package is built.

A package index shows the readme alone, so its relative links need an address. The repository
holds none: a fork's package should not lead elsewhere. K8SJOB_REPOSITORY names it, such as
https://HOST/OWNER/k8sjob; without it, links to files become plain text and no URLs are written.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE: Final = "K8SJOB_REPOSITORY"
_LINK: Final = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:|#)(?P<path>[^)\s]+)\)")


class Address(MetadataHookInterface):
    """Sets `readme` and `urls`, the two dynamic fields of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields.

        Raises:
            ValueError: the variable holds no https URL.
        """
        url = os.environ.get(VARIABLE, "").rstrip("/")
        if url and not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)+", url):
            raise ValueError(f"{VARIABLE}={url!r}: write https://HOST/OWNER/REPOSITORY")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        tag = f"v{metadata['version']}"
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, url, tag)}
        if url:
            pages = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}
            metadata["urls"] = {"Source": url, "Issues": f"{url}/issues"} | {
                name: f"{url}/blob/{tag}/{path}" for name, path in pages.items()
            }


def absolute(text: str, url: str, tag: str) -> str:
    """The readme with links that work anywhere; without a URL, their text alone."""

    def link(match: re.Match[str]) -> str:
        if not url:
            return "" if match["image"] else match["text"]
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({url}/{kind}/{tag}/{match['path']})"

    return _LINK.sub(link, text)
