"""The overlays for KubeRay that come with specdec, and a copy of one that stands alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.config.files import read_yaml
from specdec.core.errors import InvalidParameterError

KUSTOMIZATION = "kustomization.yaml"
COPY = "manifests"
"""Folder, beside the rendered files, of the overlay and of all that it is built on."""
_REFERENCES = ("resources", "components", "transformers", "generators", "validators")
_LEFT_OUT = shutil.ignore_patterns("*.py", "*.pyc", "__pycache__", "*.md")


def overlays() -> Path:
    """The folder of the overlays: in an installed package beside this module, else in the clone."""
    here = Path(__file__).resolve().parents[1]
    installed = here / "k8s" / "overlays"
    return installed if installed.is_dir() else here.parent / "k8s" / "overlays"


def find_overlay(name: str) -> Path:
    """The folder of an overlay, by its path or its name.

    Raises:
        InvalidParameterError: There is none.
    """
    known = overlays()
    for folder in (Path(name), known / name):
        if (folder / KUSTOMIZATION).is_file():
            return folder.resolve()
    names = ", ".join(sorted(folder.name for folder in known.iterdir())) if known.is_dir() else "none"
    raise InvalidParameterError(
        "overlay",
        f"overlay: {name} is no folder with a {KUSTOMIZATION}, and none of those that come with specdec: {names}",
    )


def placement(overlay: Path) -> dict[str, Any]:
    """What an overlay's ``placement.yaml`` says, over what those say that its kustomization begins with."""
    found: dict[str, Any] = {}
    for below in _references(overlay, ("resources",)):
        found = laid_over(found, placement(below))
    own = overlay / "placement.yaml"
    return laid_over(found, read_yaml(own)) if own.exists() else found


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one; where both have a key, ``above`` counts, section by section."""
    result = dict(below)
    for key, value in above.items():
        old = below.get(key)
        result[key] = laid_over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def copy_overlay(overlay: Path, out: Path) -> Path:
    """Copy an overlay, and all that it is built on, into a folder; nothing of the copy points out of it.

    Files that are there are overwritten, and others are left alone.

    Args:
        overlay: Its folder.
        out: Where the rendered files are; the copy is in ``manifests`` there.

    Returns:
        The copy's path, relative to ``out``.
    """
    folders = {overlay.resolve(), *_all_below(overlay.resolve())}
    root = Path(os.path.commonpath(folders))
    copy = (out / COPY).resolve()

    def left_out(folder: str, names: list[str]) -> set[str]:
        is_out = {name for name in names if Path(folder, name).resolve() == out.resolve()}
        return _LEFT_OUT(folder, names) | is_out

    if not overlay.resolve().is_relative_to(copy):  # else it is such a copy itself
        for folder in sorted(folders):
            shutil.copytree(folder, copy / folder.relative_to(root), ignore=left_out, dirs_exist_ok=True)
        return Path(COPY) / overlay.resolve().relative_to(root)
    return overlay.resolve().relative_to(out.resolve())


def kustomization(overlay: Path, path: Path) -> dict[str, Any]:
    """The kustomization that puts the rendered files, and further patches, in the place of an overlay's own.

    Args:
        overlay: Its folder.
        path: Of the overlay as the kustomization is to name it.
    """
    repeated = read_yaml(overlay / KUSTOMIZATION).get("transformers", [])
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [str(path)],
        "configMapGenerator": [
            {"name": "specdec-serve", "behavior": "replace", "files": ["serve.yaml"]},
            {"name": "specdec-environment", "behavior": "replace", "envs": ["environment.env"]},
        ],
        "transformers": [os.path.normpath(path / transformer) for transformer in repeated],
    }


def _all_below(folder: Path) -> Iterator[Path]:
    for below in _references(folder, _REFERENCES):
        yield below
        yield from _all_below(below)


def _references(folder: Path, keys: tuple[str, ...]) -> Iterator[Path]:
    """Folders with a kustomization that one names; files, and what is on the network, are not among them."""
    content = read_yaml(folder / KUSTOMIZATION)
    for key in keys:
        for entry in content.get(key, []):
            if (folder / entry / KUSTOMIZATION).is_file():
                yield (folder / entry).resolve()
