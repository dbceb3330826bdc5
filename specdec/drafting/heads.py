"""Drafts in the target's process, from the hidden states of its own steps: what a method has to have, and its use.

What heads cache lies in the blocks of their sequences, in layers beside the target's own. So it is cut back, shared,
moved and lost with what the target caches, and no method knows of that.
"""

from __future__ import annotations

import json
import pickle
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.cache.blocks import CachedSequence
from specdec.core.drafts import NO_DRAFT, OF_HEADS, RANKS, Draft, chain_shape, kept_share, tree_shape
from specdec.core.errors import ModelLoadError
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenSequence, as_list, followed
from specdec.drafting.head_chains import HeadChains
from specdec.drafting.registry import HEADS
from specdec.executor.rows import HeadInput
from specdec.executor.runner import ModelRunner
from specdec.models.hidden import HiddenStates
from specdec.models.loading import LoadedModel
from specdec.models.probe import AttentionLayer
from specdec.sampling.acceptance import Drawn, propose
from specdec.sampling.pipeline import RowGroup, Sampler


class DraftHeads(Protocol):
    """A method that drafts from the target's hidden states; nothing here decides a token.

    State i of a sequence is what the target computed where it read token i. Features are what a method makes of it, and
    token i + 1: of the last state and the newest token they give logits for what comes after that.
    """

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The states that it reads; see :class:`specdec.models.hidden.HiddenStates`."""
        ...

    @property
    def cache_layers(self) -> tuple[AttentionLayer, ...]:
        """What it caches for each token, with indices that the target's layers do not have; empty for nothing.

        Only a method that caches has :meth:`forward` called.
        """
        ...

    @property
    def num_tokens(self) -> int | None:
        """How many tokens in a row it drafts at most; None for any number."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of its weights, without those that are the target's."""
        ...

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """States to features: [N, hidden size] for each of ``hidden_layers`` -> [N, F], or any shape that begins so."""
        ...

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, **caches: Any) -> Tensor:
        """Features, each with the token after it, to the features that the next logits are of.

        Args:
            features: [N, F], of states; or, in a draft, of what this method has given for the token before.
            tokens: int32 [N].
            positions: int32 [N].
            caches: What attention layers of transformers take: ``past_key_values`` and ``attention_context``.

        Returns:
            [N, F].
        """
        ...

    def logits(self, features: Tensor, place: int) -> Tensor:
        """Logits for a token of a draft.

        Args:
            features: [R, F].
            place: Of the token in the draft, from 0.

        Returns:
            float32 [R, at least the tokenizer's vocabulary].
        """
        ...


LoadHeads = Callable[[str, LoadedModel], DraftHeads]
"""Loads heads for a model from a local folder or the hub, onto its device; raises ModelLoadError where it cannot."""


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Which heads are on a target, and how far they draft.

    Attributes:
        path: Local folder or hub id.
        most_tokens: Draft tokens in a row, at most, where the request names no bound of its own.
        tree_tokens: Tokens of a draft that is a tree; with no more than are in a row it is a chain.
        method: Its name in :data:`specdec.drafting.registry.HEADS`, or an import string of a :data:`LoadHeads`.
    """

    path: str
    most_tokens: int
    tree_tokens: int = 0
    method: str = "medusa"

    @property
    def num_chained_tokens(self) -> int:
        """Draft tokens in a row that are drawn in one launch where steps are recorded; 0 for trees."""
        return 0 if self.tree_tokens > self.most_tokens else self.most_tokens


def load_heads(options: HeadsOptions, target: LoadedModel) -> tuple[LoadedModel, DraftHeads]:
    """Load heads; gives the model as it is with them.

    Raises:
        ModelLoadError: They cannot be read, or are not this model's.
    """
    if target.opaque_state is not None:
        raise ModelLoadError(f"{target.name} keeps a state that can only be copied: it takes no heads")
    load: LoadHeads = pkgutil.resolve_name(HEADS.get(options.method, options.method))
    heads = load(options.path, target)
    return with_heads(target, heads), heads


def with_heads(target: LoadedModel, heads: DraftHeads) -> LoadedModel:
    """A model that notes what heads read, and caches what they cache.

    Raises:
        ModelLoadError: It has no such layers.
    """
    try:
        hidden = HiddenStates(target.model, heads.hidden_layers)
    except ValueError as error:
        raise ModelLoadError(f"{target.name} does not go with its heads: {error}") from error
    layers = (*target.attention_layers, *heads.cache_layers)
    return replace(target, hidden=hidden, attention_layers=layers, weights_bytes=target.weights_bytes + heads.num_bytes)


def head_folder(path: str) -> Path:
    """The folder of heads, from the hub where it is not a local one.

    Raises:
        ModelLoadError: There is none.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelLoadError(f"there is no folder {path} with heads")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["config.json", "*.safetensors", "pytorch_model.bin"]))
    except Exception as error:  # a lost connection is the HTTP client's own kind of error
        raise ModelLoadError(f"cannot load the heads {path}: {error}") from error


def read_heads(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What ``config.json`` and the files of weights hold: safetensors, or ``pytorch_model.bin`` with tensors alone.

    Raises:
        ModelLoadError: They cannot be read.
    """
    folder = head_folder(path)
    try:
        fields = json.loads((folder / "config.json").read_text())
        weights = {
            name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
        }
        pickled = folder / "pytorch_model.bin"
        if not weights and pickled.exists():
            weights = torch.load(pickled, map_location="cpu", weights_only=True)
        return dict(fields), weights
    except (OSError, ValueError, TypeError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
        raise ModelLoadError(f"cannot load the heads {path}: {error}") from error


class HeadRow(NamedTuple):
    """What a step has read of a sequence for good.

    Attributes:
        sequence: As it is now: what was refused is cut off.
        start: Position of the first state.
        states: Numbers of the step's tokens that they are of, at least one.
        tokens: The token after each.
        spec: Of the sequence.
        text: All committed tokens; ``tokens`` are among them.
        num_tokens: Most draft tokens in a row after them; 0 for none.
    """

    sequence: CachedSequence
    start: int
    states: Sequence[int]
    tokens: TokenSequence
    spec: SequenceSpec
    text: TokenSequence
    num_tokens: int


class HeadDrafter:
    """Drafts a token at a place after the other, by the rule and the parameters of each sequence; several for a tree.

    Heads that cache nothing know of the tokens of a draft nothing: their trees have one shape. For others a tree grows
    where tokens are likeliest to be kept (Li et al. 2024, "EAGLE-2: Faster inference of language models with dynamic
    draft trees", section 4).

    Args:
        heads: Give logits for the places.
        runner: Of the target that they are on.
        sampler: Of the target: what it may not say is not drafted.
        most_tokens: As in :class:`HeadsOptions`.
        tree_tokens: As there.
    """

    def __init__(
        self, heads: DraftHeads, runner: ModelRunner, sampler: Sampler, most_tokens: int, tree_tokens: int = 0
    ) -> None:
        self._heads, self._runner, self._sampler = heads, runner, sampler
        self._most = most_tokens if heads.num_tokens is None else min(most_tokens, heads.num_tokens)
        self._tree_tokens = tree_tokens if tree_tokens > self._most > 0 and runner.takes_trees else 0
        self._shape = chain_shape(self._most)
        if self._tree_tokens and not self.has_cache:
            self._shape = tree_shape(tree_tokens, self._most)
            self._most = 1 + max(node.place for node in self._shape)
        ranks = {(node.place, node.rank) for node in self._shape}
        self._num_ranks = [sum(place == at for place, _ in ranks) for at in range(self._most)]
        self._chains = None if self._tree_tokens else HeadChains.recorded(heads, runner, sampler)

    @property
    def has_cache(self) -> bool:
        """Whether the heads must be given all that is read; else what a draft begins with."""
        return bool(self._heads.cache_layers)

    def count(self, spec: SequenceSpec) -> int:
        """Most draft tokens in a row of a sequence."""
        bound = spec.num_speculative_tokens
        return self._most if bound is None else min(bound, self._most)

    def drafts(self, states: Sequence[Tensor], rows: Sequence[HeadRow]) -> list[Draft]:
        """A draft for each sequence that is to have one; what heads cache of all of them is brought up to date.

        Args:
            states: Of all tokens of the step, [N, hidden size] each.
            rows: No sequence twice.
        """
        drafts = [NO_DRAFT] * len(rows)
        if not rows:
            return drafts
        counts = [self._room(row, row.num_tokens - 1) + 1 if self.has_cache else row.num_tokens for row in rows]
        found = None if self._chains is None else self._chains.draw(states, rows, counts)
        if found is not None:
            for i, tokens in found.items():
                drafts[i] = _draft([Drawn(token) for token in tokens], range(-1, len(tokens) - 1))
            return drafts
        # Without drawing: what a sampler makes in this mode and keeps could not be changed outside of it.
        with torch.inference_mode():
            fused, features = self._read(states, rows)
        drafting = [i for i, row in enumerate(rows) if row.num_tokens]
        if not drafting:
            return drafts
        chosen, fused, features = [rows[i] for i in drafting], fused[drafting], features[drafting]
        if self._tree_tokens and self.has_cache:
            made = self._trees(fused, features, chosen)
        else:
            places = self._places(features, chosen, [counts[i] for i in drafting])
            made = [self._shaped(one) for one in places]
        self._sampler.take_failures()  # what a hook made of a draft fails no sequence
        for i, draft in zip(drafting, made, strict=True):
            drafts[i] = draft
        return drafts

    def _read(self, states: Sequence[Tensor], rows: Sequence[HeadRow]) -> tuple[Tensor, Tensor]:
        """Each row's last features, before and after the heads' own layers, [R, F] both."""
        numbers, ends = list[int](), list[int]()
        for row in rows:
            numbers += row.states
            ends.append(len(numbers) - 1)
        if not self.has_cache:
            numbers, ends = [numbers[end] for end in ends], list(range(len(ends)))
        fused = self._heads.fuse([state[numbers] for state in states])
        if not self.has_cache:
            return fused, fused
        inputs = [HeadInput(row.sequence, row.start, as_list(row.tokens)) for row in rows]
        features = self._runner.forward_heads(self._heads.forward, inputs, fused)
        return fused[ends], features[ends]

    def _draw(self, features: Tensor, place: int, groups: Sequence[RowGroup], num_ranks: int) -> list[list[Drawn]]:
        with torch.inference_mode():
            logits = self._heads.logits(features, place)
        # Heads that overflow draft badly, and no more.
        drawn = propose(self._sampler, logits.nan_to_num(0.0), groups, num_ranks - 1)
        return [[first, *map(Drawn, first.guesses)] for first in drawn]

    def _places(self, features: Tensor, rows: Sequence[HeadRow], counts: Sequence[int]) -> list[list[list[Drawn]]]:
        """Of each row, what was drawn for each place of its draft, the first of them in a chain."""
        texts = [row.text for row in rows]
        places: list[list[list[Drawn]]] = [[] for _ in rows]
        going = list(range(len(rows)))
        for place, num_ranks in enumerate(self._num_ranks[: max(counts)]):
            still = [k for k, i in enumerate(going) if counts[i] > place]
            if len(still) < len(going):
                going, features = [going[k] for k in still], features[still]
            if place and self.has_cache:
                inputs = [
                    HeadInput(rows[i].sequence, len(rows[i].text) + place - 2, [int(texts[i][-1])]) for i in going
                ]
                features = self._runner.forward_heads(self._heads.forward, inputs, features)
            groups = [RowGroup(rows[i].spec, texts[i]) for i in going]
            for i, drawn in zip(going, self._draw(features, place, groups, num_ranks), strict=True):
                places[i].append(drawn)
                texts[i] = followed(texts[i], (drawn[0].token,))
        return places

    def _room(self, row: HeadRow, count: int) -> int:
        """Make room for draft tokens in the heads' cache, for as many of them as there is."""
        while count > 0 and not self._runner.reserve(row.sequence, len(row.text) - 1 + count):
            count -= 1
        return count

    def _shaped(self, places: list[list[Drawn]]) -> Draft:
        """The shape's tokens, as far as there are places and tokens drawn for them."""
        numbers, parents = {-1: -1}, list[int]()
        drawn: list[Drawn] = []
        for number, node in enumerate(self._shape):
            if node.parent in numbers and node.place < len(places) and node.rank < len(places[node.place]):
                numbers[number] = len(drawn)
                parents.append(numbers[node.parent])
                drawn.append(places[node.place][node.rank])
        return _draft(drawn, parents)

    def _trees(self, fused: Tensor, features: Tensor, rows: Sequence[HeadRow]) -> list[Draft]:
        """Grow all rows' trees place by place. Each pass reads a tree anew from its beginning."""
        # A grammar's masks follow a chain.
        sizes = [row.num_tokens if row.spec.sampling.grammar else self._tree_tokens for row in rows]
        trees = [
            _Tree(row, self._room(row, size), 1 if row.spec.sampling.grammar else len(RANKS), features[i])
            for i, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]
        for place in range(max(row.num_tokens for row in rows)):
            ends = [(i, node) for i, tree in enumerate(trees) for node in tree.ends(place)]
            if place:
                growing = sorted({i for i, _ in ends})
                if not growing:
                    break
                self._advance(trees, growing, fused)
            if not ends:
                break
            groups = [RowGroup(rows[i].spec, trees[i].text(node)) for i, node in ends]
            siblings = self._draw(torch.stack([trees[i].features[node] for i, node in ends]), place, groups, len(RANKS))
            for (i, node), drawn in zip(ends, siblings, strict=True):
                trees[i].grow(node, place, drawn)
        return [tree.draft() for tree in trees]

    def _advance(self, trees: Sequence[_Tree], growing: Sequence[int], fused: Tensor) -> None:
        """The features of all tokens in the trees."""
        inputs, given = list[HeadInput](), list[Tensor]()
        for i in growing:
            row, (nodes, parents) = trees[i].row, trees[i].kept()
            tokens = [int(row.text[-1]), *(trees[i].drawn[node].token for node in nodes)]
            inputs.append(HeadInput(row.sequence, len(row.text) - 2, tokens, parents))
            given += [fused[i], *(trees[i].features[trees[i].parents[node]] for node in nodes)]
        features = self._runner.forward_heads(self._heads.forward, inputs, torch.stack(given))
        start = 0
        for i in growing:
            nodes, _ = trees[i].kept()
            trees[i].features |= {node: features[start + 1 + k] for k, node in enumerate(nodes)}
            start += 1 + len(nodes)


class _Tree:
    """A draft of one sequence that grows.

    Args:
        row: The sequence.
        size: Most tokens of the draft; 0 where there is room for none, but one that is not read.
        num_ranks: Most tokens after one.
        features: Of the newest token.

    Attributes:
        drawn: Tokens, each behind the one that it follows.
        parents: Which of them each one follows, -1 for the newest of the sequence.
        features: Of tokens by number.
    """

    def __init__(self, row: HeadRow, size: int, num_ranks: int, features: Tensor) -> None:
        self.row = row
        self.drawn: list[Drawn] = []
        self.parents: list[int] = []
        self.features: dict[int, Tensor] = {-1: features}
        self._size, self._num_ranks = max(size, 1), num_ranks
        self._num_places = row.num_tokens if size else 1
        self._values: list[float] = []  # how likely each is to be kept, and no likelier than the one before it
        self._places: list[int] = []

    def ends(self, place: int) -> list[int]:
        """The tokens that those of a place may follow."""
        if place >= self._num_places:
            return []
        return [-1] if place == 0 else [node for node in self.kept()[0] if self._places[node] == place - 1]

    def text(self, node: int) -> TokenSequence:
        """The sequence up to a token of the tree."""
        path = list[int]()
        while node >= 0:
            path.append(self.drawn[node].token)
            node = self.parents[node]
        return followed(self.row.text, path[::-1])

    def grow(self, node: int, place: int, drawn: Sequence[Drawn]) -> None:
        """Add what was drawn after a token."""
        value, likelihoods = 1.0 if node < 0 else self._values[node], drawn[0].likelihoods
        for rank, one in enumerate(drawn[: self._num_ranks]):
            share = likelihoods[rank] if rank < len(likelihoods) else kept_share(0, rank)
            self.drawn.append(one)
            self.parents.append(node)
            self._values.append(value * share)
            self._places.append(place)

    def _best(self) -> list[int]:
        """The likeliest tokens, in that order; a token that another follows comes before it."""
        return sorted(range(len(self.drawn)), key=lambda node: -self._values[node])[: self._size]

    def kept(self) -> tuple[list[int], list[int]]:
        """The likeliest tokens in the order in which they were drawn, and their parents among themselves."""
        nodes = sorted(self._best())
        number = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return nodes, [number[self.parents[node]] for node in nodes]

    def draft(self) -> Draft:
        """The likeliest tokens, the likeliest first."""
        nodes = self._best()
        number = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return _draft([self.drawn[node] for node in nodes], [number[self.parents[node]] for node in nodes])


def _draft(drawn: Sequence[Drawn], parents: Sequence[int]) -> Draft:
    is_chain = list(parents) == list(range(-1, len(parents) - 1))
    return Draft(tuple(one.token for one in drawn), OF_HEADS, () if is_chain else tuple(parents))
