"""A model stepped by hand, for decoders of one's own: logits after a text, after many continuations, over a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specdec.core.errors import InvalidParameterError, MemoryPlanError
from specdec.engine.build import BackendOptions, build_target
from specdec.engine.sequences import BRANCH, DECIDED, Rank, SequenceStates
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.text.prompts import check_token_ids, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_TOKENS = 512
"""Tokens of a long text that are read at once."""
_TEXT = "text"
_RANK: Rank = (DECIDED, 0, 0.0, _TEXT)


class Stepper:
    """One text, read so far, and the model's logits after it. Reading is put off until logits are asked for.

    Logits are the model's own, before any sampling parameter, on its output device. For one thread at a time.

    Args:
        runner: The model with its caches, for this stepper alone.
        tokenizer: Of the model.
    """

    def __init__(self, runner: ModelRunner, tokenizer: PreTrainedTokenizerBase) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._states = SequenceStates(runner)
        self._tokens: list[int] = []
        self._num_agreed = 0
        self._logits: torch.Tensor | None = None
        self._hidden = torch.empty(0)
        head = runner.loaded.model.get_output_embeddings()
        head.register_forward_pre_hook(self._take_hidden)

    @classmethod
    def from_pretrained(cls, source: ModelSource, options: BackendOptions | None = None) -> Stepper:
        """Load a model.

        Args:
            source: Where from, and how to hold it.
            options: Cache and checks; by default room for 64 texts, or branches, at once.

        Raises:
            ModelLoadError: It cannot be loaded, or served exactly.
            MemoryPlanError: Its cache cannot hold one text.
        """
        # Logits outlive a step here, which a graph's do not, and steps may be of any size.
        options = replace(options or BackendOptions(max_num_seqs=64), executor="eager")
        _, built = build_target(source, options)
        return cls(built.runner, load_tokenizer(source))

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was observed."""
        return tuple(self._tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds by itself.

        Raises:
            InvalidParameterError: It is no Unicode, or is empty and no token stands for that.
        """
        return encode_text(self._tokenizer, text, "text")

    def observe(self, tokens: Sequence[int]) -> None:
        """Go on with these tokens, at least one.

        Raises:
            InvalidParameterError: One is not the model's, or the text gets longer than the model reads.
        """
        self._check(tokens)
        self._tokens += tokens
        self._logits = None

    def rollback_to(self, length: int) -> None:
        """Take back all tokens from position ``length`` on.

        What recurrent layers cannot take back is read anew.

        Raises:
            InvalidParameterError: ``length`` is not in [0, len(self)].
        """
        if not 0 <= length <= len(self._tokens):
            raise InvalidParameterError("length", f"length must be in [0, {len(self._tokens)}], got {length}")
        if length < len(self._tokens):
            del self._tokens[length:]
            self._num_agreed = min(self._num_agreed, length)
            self._logits = None

    def next_logits(self) -> torch.Tensor:
        """Logits of the token after the text, float32 [vocabulary].

        Raises:
            InvalidParameterError: Nothing was observed.
            MemoryPlanError: The cache has no room for the text.
        """
        if not self._tokens:
            raise InvalidParameterError("tokens", "observe at least one token first")
        if self._logits is None:
            self._states.want(_TEXT, self._tokens, self._num_agreed, b"", _RANK)
            if self._states.allocate(_TEXT, _CHUNK_TOKENS) is None:
                raise MemoryPlanError(f"the cache has no room for {len(self._tokens)} tokens")
            sequence = self._states.sequence(_TEXT)
            self._num_agreed = len(self._tokens)
            while (left := len(self._tokens) - len(sequence)) > _CHUNK_TOKENS:
                chunk = self._tokens[len(sequence) : len(sequence) + _CHUNK_TOKENS]
                self._runner.forward([RowInput(sequence, chunk, 0)])
                if not self._runner.reserve(sequence, len(self._tokens), _CHUNK_TOKENS):
                    raise MemoryPlanError(f"the cache has no room for {len(self._tokens)} tokens")
            self._logits = self._runner.forward([RowInput(sequence, self._tokens[-left:], 1)])[0]
            self._last_hidden = self._hidden[-1]
        return self._logits

    def last_hidden_state(self) -> torch.Tensor:
        """What the vocabulary's head was given at the text's last token, [hidden size] in the model's dtype.

        Raises like :meth:`next_logits`.
        """
        self.next_logits()
        return self._last_hidden

    def batched_logits(self, continuations: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits after the text and each of some continuations, float32 [continuations, vocabulary].

        The text stays as it is. An empty continuation stands for the text itself. Raises like :meth:`next_logits` and
        :meth:`observe`.
        """
        own = self.next_logits()
        branches = iter(self._branches([tokens for tokens in continuations if tokens]))
        rows = [next(branches)[-1] if tokens else own for tokens in continuations]
        return torch.stack(rows) if rows else own.new_empty(0, len(own))

    def tree_logits(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Logits after each node of a tree of tokens that goes on from the text, float32 [nodes, vocabulary].

        Each path from the root to a leaf is a branch of the cache and a row of the batch, so that no mask is needed.

        Args:
            tokens: Of each node, each after its parent's.
            parents: Index of each node's parent; -1 for those that follow the text itself.

        Raises:
            InvalidParameterError: ``parents`` is no tree in that order; and like :meth:`batched_logits`.
        """
        if len(parents) != len(tokens) or any(not -1 <= parent < i for i, parent in enumerate(parents)):
            raise InvalidParameterError("parents", "parents must name, for each token, an earlier one or -1")
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), node])
        leaves = [paths[node] for node in sorted(set(range(len(tokens))) - set(parents))]
        found: dict[int, torch.Tensor] = {}
        for path, logits in zip(leaves, self._branches([[tokens[n] for n in path] for path in leaves]), strict=True):
            found |= dict(zip(path, logits, strict=True))
        own = self.next_logits()
        return torch.stack([found[node] for node in range(len(tokens))]) if tokens else own.new_empty(0, len(own))

    def _branches(self, paths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits at all tokens of each path after the text, as many paths at once as there is room for."""
        for path in paths:
            self._check(path)
        self.next_logits()
        results: list[torch.Tensor] = []
        while len(results) < len(paths):
            rows = self._rows(paths[len(results) :])
            if not rows:
                raise MemoryPlanError(f"the cache has no room for {len(paths[len(results)])} tokens after the text")
            logits = self._runner.forward(rows)
            results += torch.split(logits, [row.num_logits for row in rows])
            for i in range(len(rows)):
                self._states.release(f"branch {i}")
        return results

    def _rows(self, paths: Sequence[Sequence[int]]) -> list[RowInput]:
        rows: list[RowInput] = []
        for i, path in enumerate(paths):
            rank = (BRANCH, 0, float(i), f"branch {i}")
            whole = [*self._tokens, *path]
            key = f"branch {i}"
            self._states.want(key, whole, len(self._tokens), b"", rank, fork_of=_TEXT)
            if self._states.allocate(key, len(path)) is None:
                break
            rows.append(RowInput(self._states.sequence(key), path, len(path)))
        return rows

    def _check(self, tokens: Sequence[int]) -> None:
        check_token_ids(tokens, self._runner.loaded.vocab_size, "tokens")
        length, most = len(self._tokens) + len(tokens), self._runner.loaded.max_model_len
        if length > most:
            raise InvalidParameterError("tokens", f"the model reads {most} tokens, not {length}")

    def _take_hidden(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0][0]
