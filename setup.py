"""Puts the manifests for KubeRay into the wheel, as data of ``cluster``; all else is in ``pyproject.toml``."""

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


setup(cmdclass={"build_py": BuildWithManifests})
