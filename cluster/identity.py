"""Which models a configuration names, without loading them: for every process of the service. Imports no torch."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import specdec.demo
from cluster.config import AppArgs, Demo, Dtype, ModelConfig
from specdec.models.fingerprint import digest, model_fingerprint, vocabulary_fingerprint
from specdec.types import Fingerprints

DEMO_TARGETS: dict[Demo, str] = {"plain": "target", "hybrid": "hybrid"}
"""Folder of each demo target."""


def demo_folder(name: str) -> Path:
    """The folder of a demo model: ``target``, ``hybrid`` (another target) or ``draft``."""
    return Path(specdec.demo.__file__).parent / name


def target_path(args: AppArgs) -> str:
    """Hub id or folder of the target."""
    return args.target.model or str(demo_folder(DEMO_TARGETS[args.demo]))


def draft_path(args: AppArgs) -> str:
    """Hub id or folder of the draft, where there is one."""
    return args.draft.model or str(demo_folder("draft"))


def model_dtype(args: AppArgs, model: ModelConfig) -> Dtype:
    """The demo pair runs in float32 unless told otherwise: then a seed's tokens are the same for every schedule."""
    return "float32" if args.is_demo and model.dtype == "auto" else model.dtype


def fingerprints(args: AppArgs) -> Fingerprints:
    """What the service's target and vocabulary are (rule 14); the same in every process of one configuration.

    Placement, limits, plans and all else that decides no token are not in it.

    Raises:
        ModelLoadError: The target cannot be found or read.
    """
    return _fingerprints(args, args.target, target_path(args))


def draft_fingerprints(args: AppArgs) -> Fingerprints:
    """The same of the draft as a model of its own.

    Raises:
        ModelLoadError: It cannot be found or read.
    """
    return _fingerprints(args, args.draft, draft_path(args))


def _fingerprints(args: AppArgs, model: ModelConfig, path: str) -> Fingerprints:
    where = (model.revision, model.token.get_secret_value() if model.token else None)
    # The draft's vocabulary is checked against the target's before it serves, so that one text stands for both.
    tokens = (args.target.revision, args.target.token.get_secret_value() if args.target.token else None)
    vocabulary = vocabulary_fingerprint(target_path(args), *tokens)
    decision = digest(
        {
            "model": model_fingerprint(path, *where),
            "vocabulary": vocabulary,
            "dtype": model_dtype(args, model),
            "engine": _engine(args, model),
            "acceptance": args.acceptance,
            "logits_processors": args.logits_processors,
            "scripted": args.scripted.model_dump(mode="json"),
        }
    )
    return Fingerprints(decision=decision, vocabulary=vocabulary)


def _engine(args: AppArgs, model: ModelConfig) -> list[str]:
    """What rounds otherwise in another version; in float32 the tokens are the same for all."""
    dtype = model_dtype(args, model)
    if dtype == "float32" or (dtype == "auto" and model.device == "cpu"):
        return []
    device = "cpu" if model.device == "cpu" else "any"
    return [f"torch {version('torch')}", f"transformers {version('transformers')}", device, f"compile {model.compile}"]
