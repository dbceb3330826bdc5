"""Puts the manifests for KubeRay into the wheel, as data of ``cluster``, and the repository's address beside its name.

All else is in ``pyproject.toml``.
"""

import os
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


def project_urls() -> dict[str, str]:
    """Addresses on the package index: those of the repository that the release workflow runs in; none elsewhere."""
    repository = os.environ.get("GITHUB_REPOSITORY")
    if not repository:
        return {}
    address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
    return {
        "Source": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


setup(cmdclass={"build_py": BuildWithManifests}, project_urls=project_urls())
