"""Puts the repository's address into the metadata.

The README's links would lead nowhere on a package index without it.

All else is in ``pyproject.toml``.
"""

import os
import re
from pathlib import Path

from setuptools import setup


def repository() -> str | None:
    """Address of the repository that the release workflow runs in; None elsewhere."""
    name = os.environ.get("GITHUB_REPOSITORY")
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else None


def project_urls(address: str) -> dict[str, str]:
    """Addresses on the package index."""
    return {
        "Source": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def description(address: str | None) -> str:
    """The README; where the address is known, with absolute links to the files of the released version."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    if address is None:
        return text
    version = os.environ.get("GITHUB_REF_NAME", "main")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{address}/raw/{version}/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{address}/blob/{version}/", text)


ADDRESS = repository()
setup(
    project_urls=project_urls(ADDRESS) if ADDRESS else {},
    long_description=description(ADDRESS),
    long_description_content_type="text/markdown",
)
