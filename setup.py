"""Puts the manifests for KubeRay into the wheel, as data of ``cluster``, and the repository's address into metadata.

The README's links would lead nowhere on a package index without it.

All else is in ``pyproject.toml``.
"""

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LEFT_OUT = shutil.ignore_patterns("*.py", "*.pyc", "__pycache__", "*.md")


class BuildWithManifests(build_py):
    """The packages, and the manifests beside them."""

    def run(self) -> None:
        """Copy them; an editable install finds them in the clone."""
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                Path(__file__).parent / "k8s",
                Path(self.build_lib) / "cluster" / "k8s",
                ignore=LEFT_OUT,
                dirs_exist_ok=True,
            )


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
    cmdclass={"build_py": BuildWithManifests},
    project_urls=project_urls(ADDRESS) if ADDRESS else {},
    long_description=description(ADDRESS),
    long_description_content_type="text/markdown",
)
