"""From documents to token ids: the byte-level BPE, the token files, and the order in which training reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.train_draft.corpus import Document

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
END_ID = 0


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``vocab_size`` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


@dataclass(frozen=True, slots=True)
class Source:
    """What one package gave: how many files and tokens, under which licence."""

    package: str
    license: str
    num_files: int
    num_tokens: int


class TokenFile:
    """Token ids of one split on disk: ``<name>.bin`` (uint16, each document followed by END_ID) and its documents."""

    def __init__(self, folder: Path, name: str) -> None:
        self.tokens = np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="r")
        index = json.loads((folder / f"{name}.json").read_text())
        self.paths: list[str] = index["paths"]
        self.starts: list[int] = index["starts"]

    def document(self, index: int) -> Tensor:
        """Token ids of one document, int64 [num_tokens], without END_ID."""
        end = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.tokens)
        return torch.from_numpy(self.tokens[self.starts[index] : end - 1].astype(np.int64))


def write_tokens(documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, folder: Path) -> list[Source]:
    """Writes ``train`` and ``heldout`` token files of the documents; returns what each package gave."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {split: (folder / f"{split}.bin").open("wb") for split in ("train", "heldout")}
    index: dict[str, dict[str, list[object]]] = {split: {"paths": [], "starts": []} for split in files}
    counts: dict[str, list[int]] = {}
    for document in documents:
        split = "heldout" if document.held_out else "train"
        ids = np.array([*tokenizer(document.text)["input_ids"], END_ID], dtype=np.uint16)
        index[split]["paths"].append(f"{document.package}/{document.path}")
        index[split]["starts"].append(files[split].tell() // ids.itemsize)
        files[split].write(ids.tobytes())
        count = counts.setdefault(document.package, [0, 0])
        count[0], count[1] = count[0] + 1, count[1] + len(ids)
    for split, file in files.items():
        file.close()
        (folder / f"{split}.json").write_text(json.dumps(index[split]))
    return [Source(package, "", *count) for package, count in counts.items()]


def write_sources(sources: Iterable[Source], licenses: dict[str, str], path: Path) -> None:
    """Writes what each package gave, with its licence, as JSON."""
    rows = [asdict(source) | {"license": licenses[source.package]} for source in sources]
    path.write_text(json.dumps(sorted(rows, key=lambda row: -row["num_tokens"]), indent=1))


def windows(tokens: np.ndarray, length: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Windows of ``length + 1`` tokens in an endless shuffled order, from the ``start``-th on.

    Every epoch has its own order and its own offset; both follow from ``seed`` and the epoch's number, so that a
    resumed run reads on where it stopped.

    Args:
        tokens: uint16 [num_tokens].
        length: Tokens per window; one more is given, as the last label.
        seed: Of the order.
        start: Number of windows already read.

    Yields:
        int64 [length + 1].
    """
    num_windows = (len(tokens) - length) // length
    if num_windows < 1:
        raise ValueError(f"the text has {len(tokens)} tokens; windows of {length} need at least {2 * length}")
    while True:
        epoch, position = divmod(start, num_windows)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        offset = int(torch.randint(len(tokens) - num_windows * length, (1,), generator=generator))
        order = torch.randperm(num_windows, generator=generator)
        for number in order[position:].tolist():
            begin = offset + number * length
            yield torch.from_numpy(tokens[begin : begin + length + 1].astype(np.int64))
        start += num_windows - position


def batches(tokens: np.ndarray, length: int, batch_size: int, seed: int, start: int = 0) -> Iterator[Tensor]:
    """Batches of windows, int64 [batch_size, length + 1], from the ``start``-th window on."""
    source = windows(tokens, length, seed, start)
    while True:
        yield torch.stack([next(source) for _ in range(batch_size)])
