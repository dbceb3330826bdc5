"""One forward pass over rows of different lengths, with caches that can be rolled back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.cache.blocks import LOOKAHEAD_TOKENS, BlockPool, CachedSequence
from specdec.cache.recurrent.binding import bind, has_fast_scans
from specdec.cache.recurrent.pool import StatePool, checked_window
from specdec.cache.recurrent.slots import DEFAULT_WINDOW_TOKENS, Window
from specdec.core.errors import reason_of
from specdec.executor.chains import ChainGraphs, LaunchedChains, RunPass, TokenChooser
from specdec.executor.compiled import CompiledLayers
from specdec.executor.derive import DerivedStep
from specdec.executor.finite import FiniteRows
from specdec.executor.graphs import ExecutorLimits, PassOutput, StepGraphs, unrecordable
from specdec.executor.paged_cache import PagedCache, group_window
from specdec.executor.recurrence import Recurrence, keep_states, state_array
from specdec.executor.rows import HeadInput, RowInput, adapter_runs, lay_out_heads, lay_out_rows
from specdec.executor.sequence_cache import SequenceCache
from specdec.executor.steps import StepRows, Steps
from specdec.executor.tiles import RowPart, tiles_of
from specdec.kernels.attention import AttentionContext
from specdec.kernels.device_errors import is_out_of_memory
from specdec.kernels.experts import use_tiled_experts
from specdec.kernels.gather import GatherAttention, Workspace
from specdec.kernels.progress import StepProgress
from specdec.kernels.recurrent import recurrent_kernels
from specdec.kernels.scan import TokenByToken
from specdec.kernels.segmented import MakeAttentionKernel, attention_kernel
from specdec.models.loading import LoadedModel
from specdec.models.lora.slots import AdapterPool
from specdec.models.probe import cache_argument

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=TokenChooser)

_COMPILED_TOKENS = 67
"""Tokens of the step that layers are compiled by: few, as most steps have, and as many as no other size of a model."""


class ModelRunner(SequenceCache, FiniteRows):
    """A model and its paged cache. Used by one thread at a time.

    Args:
        loaded: The model.
        num_blocks: Blocks in the cache, of the layers that attend to all positions.
        block_size: Positions per block.
        vocab_size: Width of the logits: the tokenizer's vocabulary, where the model's is padded beyond it; the
            model's own by default.
        padding: ``cut`` ends the logits at ``vocab_size``; ``mask`` keeps the model's width and makes them -inf there.
        kernel: How attention reads the cache, by its name in :func:`~specdec.kernels.segmented.attention_kernel`;
            ``auto`` takes the best one for the model and its devices.
        num_state_slots: Sequences and branches whose recurrent states can be held at once, for a model that has any.
        window: How far back recurrent states reach.
        states: The recurrent states, in place of slots and window.
        window_blocks: Blocks in the cache of the layers with each length of sliding window; as many as ``num_blocks``
            by default.
        lookahead_tokens: How far a sequence can be cut back for sure where layers have windows.
        tile_tokens: Run every step as passes of just so many tokens, so that a token's logits have the same bits in
            whatever step it is read; see :mod:`specdec.executor.tiles`. None runs a step as one pass, and so does 0,
            for a model whose products split nothing; see :mod:`specdec.executor.unsplit`. The model's experts are
            computed accordingly from then on.
        dependent_launches: Launch the kernels of layers while the ones before still run, which saves a part of each
            launch. For GPUs of compute capability 9.0 and more. The numbers are the same.

    Attributes:
        loaded: The model.
        pool: The blocks.
        states: The recurrent states; None where the model has none.
        adapters: Those on the device.
        is_strict: Whether ``tile_tokens`` was given.
        tile_tokens: As given, but None in place of 0.
        progress: Layers done, for whoever watches from another thread.
        hidden: Of the newest step, what is noted for heads that draft: [tokens, hidden size] each, until the next step.
        extra: What came along with the newest step's upload; see :meth:`forward`.
        limits: The largest step, where steps are recorded.
        graphs_failure: After :meth:`record_graphs`, why steps are not recorded; empty where they are.
        is_recordable: After :meth:`record_graphs`, whether steps of such a model can be recorded: then
            :attr:`graphs_failure` is a fault.
        compile_failure: After :meth:`record_graphs`, what kind of model has no compiled layers; empty where they are
            compiled.
        graphs_bytes: Memory of the device that recorded steps take.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int | None = None,
        padding: Literal["cut", "mask"] = "cut",
        kernel: str = "auto",
        num_state_slots: int = 16,
        window: Window | None = None,
        states: StatePool | None = None,
        window_blocks: Mapping[int, int] | None = None,
        lookahead_tokens: int = LOOKAHEAD_TOKENS,
        tile_tokens: int | None = None,
        dependent_launches: bool = False,
    ) -> None:
        vocab_size = loaded.vocab_size if vocab_size is None else vocab_size
        if not 1 <= vocab_size <= loaded.vocab_size:
            raise ValueError(f"vocab_size must be in [1, {loaded.vocab_size}], got {vocab_size}")
        windows = [group_window(layer) for layer in loaded.attention_layers]
        blocks = BlockPool(
            num_blocks,
            block_size,
            {window: (window_blocks or {}).get(window, num_blocks) for window in windows if window is not None},
            has_full_layers=not windows or None in windows,
            lookahead_tokens=lookahead_tokens,
        )
        SequenceCache.__init__(self, blocks)
        FiniteRows.__init__(self)
        self.loaded = loaded
        self.progress = StepProgress()
        self.hidden: tuple[torch.Tensor, ...] = ()
        self.extra: Sequence[torch.Tensor] | None = None
        self.adapters = AdapterPool(loaded.adapters)
        self._vocab_size = vocab_size
        self._padding = padding
        self.is_strict = tile_tokens is not None
        self.tile_tokens = tile_tokens = tile_tokens or None
        if tile_tokens is not None:
            use_tiled_experts(loaded.model)
        if kernel == "auto":
            kernel = choose_kernel(loaded)
            kernel = "tiled" if tile_tokens is not None and kernel == "gather" else kernel
        self._kernel = kernel
        self.limits: ExecutorLimits | None = None
        self._steps = Steps(self.pool, loaded.device, tile_tokens=tile_tokens or 1)
        self._graphs: StepGraphs | None = None
        self._adapter_graphs: StepGraphs | None = None
        self._chains: ChainGraphs | None = None
        self.graphs_failure, self.compile_failure, self.graphs_bytes = "", "", 0
        self.is_recordable, self._is_trial = True, False
        self._layers: CompiledLayers | None = None
        pool = states
        if loaded.recurrent_layers:
            window = window or checked_window(DEFAULT_WINDOW_TOKENS)
            if tile_tokens is None:
                pool = states or StatePool(loaded.recurrent_layers, num_state_slots, window)
                pool.kernels = recurrent_kernels(self._kernel)
            else:
                pool = StatePool(loaded.recurrent_layers, num_state_slots + 1, window, make_scan=TokenByToken)
            self.states = pool
        is_fast = pool is not None and has_fast_scans(loaded.model)
        self._recurrence = Recurrence(pool, is_filled_up=tile_tokens is not None, has_fast_scans=is_fast)
        self._functions = nullcontext() if pool is None else bind(loaded.model, pool, self.progress)
        self._dependent_launches = dependent_launches and self._kernel == "triton"
        self._cache = PagedCache(
            loaded.attention_layers, self.pool, pool, self._kernel, dependent_launches=self._dependent_launches
        )
        self._cache_argument = cache_argument(loaded.model)
        latent = frozenset(layer.index for layer in loaded.attention_layers if layer.is_latent)
        make_kernel = _make_kernel(self._kernel, self._dependent_launches)
        self._attention = AttentionContext(make_kernel, self._cache.group_of, latent, self.progress)

    @property
    def vocab_size(self) -> int:
        """Width of the logits of :meth:`forward`."""
        return self._vocab_size if self._padding == "cut" else self.loaded.vocab_size

    @cached_property
    def output_device(self) -> torch.device:
        """Where logits are."""
        head = self.loaded.model.get_output_embeddings()
        return next((parameter.device for parameter in head.parameters()), self.loaded.device)

    @property
    def kernel(self) -> str:
        """How attention reads the cache."""
        return self._kernel

    @property
    def is_recorded(self) -> bool:
        """Whether steps have fixed sizes; see :meth:`record_graphs`."""
        return self._graphs is not None

    @property
    def slow_reasons(self) -> Iterator[str]:
        """Why attention is slower on this device than on others, of steps that were run."""
        return self._attention.slow_reasons()

    @property
    def no_speculation(self) -> str | None:
        """Why drafts are not worth verifying with this model, in a word; None: they are."""
        return None

    @property
    def takes_trees(self) -> bool:
        """Whether the new tokens of a row may be a tree: a recurrent state has one past only.

        Where bits count none may: keys beside a token's own path move those on it to other places of their
        segment, so that its sums have another order, and maybe other bits, than without them.
        """
        if self.is_strict:
            return False
        if self.limits is not None and not self.limits.has_trees:
            return False
        return self.states is None and self.loaded.opaque_state is None

    def keep_paths(self, paths: Sequence[tuple[CachedSequence, int, Sequence[int]]]) -> None:
        """Keep one path of each tree that was cached, at the positions that its tokens were read at.

        Args:
            paths: No sequence twice. Of each: the sequence as the step with the tree has left it, the position where
                the tree begins, and the path's tokens by their numbers in the tree, ascending.
        """
        size = self.pool.block_size
        moves: list[list[tuple[int, int]]] = [[] for _ in self.pool.groups]
        for sequence, start, path in paths:
            for table, of_group in zip(sequence.tables, moves, strict=True):
                for to, of in ((start + i, start + place) for i, place in enumerate(path) if i != place):
                    of_group.append((table[of // size] * size + of % size, table[to // size] * size + to % size))
            kept = sequence.tokens.array[[start + place for place in path]]
            sequence.tokens.truncate(start)
            sequence.tokens.extend(kept)
        for group, of_group in enumerate(moves):
            self._cache.move_slots(group, of_group)

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[RowInput], drawn: torch.Tensor | None = None, extra: Sequence[NDArray[Any]] = ()
    ) -> torch.Tensor:
        """Run the model over the rows' tokens, and append them to their sequences.

        Args:
            rows: At least one; no sequence twice.
            drawn: int32 [D], on the device, the tokens that rows name by :func:`~specdec.executor.steps.unread`. What
                stands for them is appended; see :meth:`set_tokens`.
            extra: Arrays that whoever samples will need on the device: they go there in the step's one upload, to
                :attr:`extra`. That is None where there is no room for them.

        Returns:
            Logits, float32 [sum of num_logits, vocab_size] on the model's output device: of each row's last
            ``num_logits`` positions, row by row. An inference tensor: not to be changed in place outside
            ``torch.inference_mode``.

        Raises:
            ValueError: a row is empty, wants more logits than it has tokens, has no room reserved, or holds a token
                that the model does not know.
        """
        return self._finish(self._launch(rows, drawn, extra))

    @torch.inference_mode()
    def launch_chains(
        self, rows: Sequence[RowInput], num_passes: Sequence[int], extra: Sequence[NDArray[Any]]
    ) -> LaunchedChains | None:
        """Draw a token for the first rows, read it, and draw the next one, in one launch; see :meth:`set_tokens`.

        Args:
            rows: As for :meth:`forward`: first those that draw, with one row of logits each, then others with none.
                With :attr:`ExecutorLimits.is_parallel` as many rows of logits as tokens are drawn, which are not read.
            num_passes: Of each row that draws how many tokens are drawn, all but the last of which are read: room for
                them is reserved. The largest comes first.
            extra: What the chooser is given.

        Returns:
            What is under way; None, with nothing done, where such a step is not recorded.
        """
        if self._chains is None or any(row.adapter is not None for row in rows):
            return None
        passes = np.ones(len(rows), np.int64)
        if not self._chains.is_parallel:
            passes[: len(num_passes)] = num_passes
        own = lay_out_rows(rows, self.loaded.vocab_size, self.pool, False, passes)
        launched = self.launch_laid_out([row.sequence for row in rows], own, num_passes, extra)
        if launched is not None:
            self.progress.advance(self.loaded.device)
            for row, count in zip(rows, passes.tolist(), strict=True):
                row.sequence.tokens.extend([*row.tokens, *[0] * (count - 1)])
        return launched

    @torch.inference_mode()
    def launch_laid_out(
        self,
        sequences: Sequence[CachedSequence],
        own: StepRows,
        num_passes: Sequence[int],
        extra: Sequence[NDArray[Any]],
    ) -> LaunchedChains | None:
        """As :meth:`launch_chains`, of what is laid out; nothing of the sequences changes here."""
        keys = [] if self._chains is None else self._chains.keys_for(len(own.tokens), num_passes)
        if self._chains is None or not keys:
            return None
        self._prepare_blocks()
        with self._steps.sent_anew_on_failure():
            self._chains.launch_step(keys, sequences, own, extra)
        return LaunchedChains(self._chains, own, num_passes)

    def set_tokens(self, sequence: CachedSequence, start: int, tokens: Sequence[int]) -> None:
        """Say which tokens were read from position ``start`` on, all of whose numbers are known by now."""
        sequence.tokens.truncate(start)
        sequence.tokens.extend(tokens)

    def _launch(
        self, rows: Sequence[RowInput], drawn: torch.Tensor | None = None, extra: Sequence[NDArray[Any]] = ()
    ) -> torch.Tensor:
        """Put a step in the device's queue: one upload, and no wait where the kernel needs none; gives logits."""
        num_drawn = 0 if drawn is None else len(drawn)
        own = lay_out_rows(rows, self.loaded.vocab_size, self.pool, self.states is not None, num_drawn=num_drawn)
        self._prepare_blocks()
        sequences, num_tokens = [row.sequence for row in rows], len(own.tokens)
        num_logits = int(own.num_logits.sum())
        has_adapters = self.loaded.adapters is not None and any(row.adapter is not None for row in rows)
        graphs = self._adapter_graphs if has_adapters else self._graphs
        size = None if graphs is None else graphs.size_for(num_tokens, num_logits)
        if has_adapters:
            own = replace(own, adapters=np.array([-1 if row.adapter is None else row.adapter for row in rows]))
        parts: Sequence[RowPart] = ()
        if has_adapters or self.states is not None:
            parts = next(tiles_of(own.num_tokens, own.num_logits, num_tokens)).parts
        moves = []
        if self.tile_tokens is None:
            moves = self._recurrence.moves(rows, parts, may_read_ahead=size is None and self.limits is not None)
        if moves:
            own = replace(own, states=state_array(moves))
        if graphs is not None and size is not None:
            with self._steps.sent_anew_on_failure():
                self.extra = self._steps.upload(sequences, own, drawn, extra)
                output = graphs.launch(size)
            self.progress.advance(self.loaded.device)
            wanted: slice | torch.Tensor = slice(num_tokens)
            if num_logits < num_tokens:
                wanted = self._steps.logit_tokens(output.step, num_logits)
            logits, finite = output.logits[wanted], output.finite_logits[wanted]
            self.hidden = tuple(state[:num_tokens] for state in output.hidden)
            self._note_finite(own, output.finite_tokens[:num_tokens], finite)
        elif self.tile_tokens is not None:
            logits = self._run_tiles(rows, own, drawn, extra)
        else:
            step, self.extra = self._steps.begin(sequences, own, drawn, extra)
            self._recurrence.begin(moves, num_tokens, step.states)
            compiled = nullcontext() if self._layers is None else self._layers.as_they_are()
            with self._functions, self._used_adapters(rows, parts, num_tokens), compiled:
                every = num_logits == num_tokens
                result = self._run(self._steps, step, None if every else self._steps.logit_tokens(step, num_logits))
            logits, self.hidden = result.logits, result.hidden
            self._note_finite(own, result.finite_tokens, result.finite_logits)
        for row in rows:
            row.sequence.tokens.extend(row.tokens)
        keep_states(moves)
        return logits

    def _run_tiles(
        self, rows: Sequence[RowInput], own: StepRows, drawn: torch.Tensor | None, extra: Sequence[NDArray[Any]]
    ) -> torch.Tensor:
        """A step as passes of one size; gives logits."""
        assert self.tile_tokens is not None
        size, steps = self.tile_tokens, self._steps
        with steps.sent_anew_on_failure():
            self.extra = steps.upload([row.sequence for row in rows], own, drawn, extra)
            step = steps.derive(steps.padded(own))
        device = self.loaded.device
        of_tokens: list[tuple[torch.Tensor, ...]] = []
        of_logits: list[tuple[torch.Tensor, ...]] = []
        for tile in tiles_of(own.num_tokens, own.num_logits, size):
            # The head reads all of a tile. Only one nobody wants logits of may read what it likes.
            in_vain = None if len(tile.logits) else torch.zeros(1, dtype=torch.int32, device=device)
            moves = self._recurrence.moves(rows, tile.parts)
            self._recurrence.begin(moves, size, None)
            with self._functions, self._used_adapters(rows, tile.parts, size):
                result = self._run(steps, step.cut(tile.start, tile.start + size), in_vain)
            keep_states(moves)
            of_tokens.append(tuple(part[: tile.num_tokens] for part in (result.finite_tokens, *result.hidden)))
            index = torch.from_numpy(tile.logits).to(device)
            of_logits.append((result.logits[index], result.finite_logits[index]))
        finite_tokens, *hidden = map(torch.cat, zip(*of_tokens, strict=True))
        logits, finite = map(torch.cat, zip(*of_logits, strict=True))
        self.hidden = tuple(hidden)
        self._note_finite(own, finite_tokens, finite)
        return logits

    def _run(self, steps: Steps, step: DerivedStep, logit_tokens: torch.Tensor | None) -> PassOutput:
        """The model over a step, for the logits of some tokens or of all."""
        self._begin(steps, step)
        model, hidden = self.loaded.model, self.loaded.hidden
        with model.base_model.register_forward_hook(self._note_finite_tokens):
            output = model(
                input_ids=step.tokens.unsqueeze(0),
                position_ids=step.position.unsqueeze(0),
                use_cache=True,
                # All are what transformers calls 0; a head must have something to read.
                logits_to_keep=0 if logit_tokens is None else logit_tokens,
                attention_context=self._attention,
                **{self._cache_argument: self._cache},
            )
        logits = output.logits[0]
        assert self._finite_tokens is not None, "the model's layers are not run by its base model"
        states = () if hidden is None else hidden.take()
        return PassOutput(step, logits, self._finite_tokens, logits.amax(1).isfinite(), states)

    def _begin(self, steps: Steps, step: DerivedStep) -> None:
        """Tell the cache and attention of a pass."""
        by_group = steps.by_group(step)
        self._cache.begin(by_group)
        self._attention.begin(by_group, steps.bounds)

    def _prepare_blocks(self) -> None:
        """Copy and clear blocks as the pool says, before anything is written."""
        for number, group in enumerate(self.pool.groups):
            group.prepare(partial(self._cache.copy_blocks, number), partial(self._cache.clear, number))

    @torch.inference_mode()
    def forward_heads(
        self, forward: Callable[..., torch.Tensor], rows: Sequence[HeadInput], features: torch.Tensor
    ) -> torch.Tensor:
        """Run heads over rows of sequences, with caches in the sequences' own blocks.

        Nothing of the sequences changes: what is cached here is read by the heads' own layers alone.

        Args:
            forward: Takes ``features``, the rows' tokens and their positions, both int32 [N], and what attention layers
                of transformers read the cache by.
            rows: At least one; no sequence twice.
            features: [N, F].

        Returns:
            What ``forward`` gives.

        Raises:
            ValueError: No room is reserved for a row.
        """
        own = lay_out_heads(rows)
        self._prepare_blocks()
        step, _ = self._steps.begin([row.sequence for row in rows], own)
        return self.run_heads(forward, step, features)

    def run_heads(
        self, forward: Callable[..., torch.Tensor], step: DerivedStep, features: torch.Tensor
    ) -> torch.Tensor:
        """A pass of heads over a step; see :meth:`forward_heads`."""
        self._begin(self._steps, step)
        caches = {"past_key_values": self._cache, "attention_context": self._attention}
        return forward(features, step.tokens, step.position, **caches)

    def _forget(self, sequence: CachedSequence) -> None:
        self._steps.release(sequence)

    def _run_padded(self, steps: Steps, has_adapters: bool, num_tokens: int) -> PassOutput:
        """The model over the newest upload and padding, with adapters or as it is: what a graph holds."""
        step = steps.derive(num_tokens)
        if step.states is not None:
            self._recurrence.begin((), num_tokens, step.states)
        adapted: AbstractContextManager[None] = nullcontext()
        if has_adapters:
            assert self.loaded.adapters is not None
            assert step.token_adapter is not None
            adapted = self.loaded.adapters.used_by(step.token_adapter)
        with self._functions, adapted:
            return self._run(steps, step, None)

    def record_graphs(
        self, limits: ExecutorLimits, backend: str | Callable[..., Any] | None = None, *, is_trial: bool = False
    ) -> None:
        """Record steps of all sizes, so that each is one launch on a GPU; see :class:`StepGraphs`.

        From then on no step may be larger than ``limits``. Where the model cannot be recorded, :attr:`graphs_failure`
        says why, and nothing changes. Layers are compiled first, where the model is of a kind for that; if the compiler
        fails, nothing is recorded.

        Args:
            limits: The largest step.
            backend: What compiles the layers; None does not compile them.
            is_trial: See what memory that takes, in :attr:`graphs_bytes`, and with :meth:`record_chains` likewise: the
                runner can run no step then.
        """
        self.graphs_failure = unrecordable(self.loaded, self._kernel, self.states)
        self.is_recordable, self._is_trial = not self.graphs_failure, is_trial
        if self.graphs_failure:
            return
        may_adapt = self.loaded.adapters is not None and self.tile_tokens is None
        steps = Steps(self.pool, self.loaded.device, limits, self.states is not None, has_adapters=may_adapt)
        steps.upload_nothing()
        if backend is not None:
            self._compile_layers(steps, limits, backend)
        graphs, adapted = (
            StepGraphs(partial(self._run_padded, steps, own), self.loaded.device) for own in (False, True)
        )
        if not self.graphs_failure:
            self.graphs_failure = graphs.record(limits.graph_sizes, is_trial)
        if may_adapt and not self.graphs_failure:
            self.graphs_failure = adapted.record(limits.graph_sizes, is_trial)
        if self.graphs_failure and self._layers is not None:
            self._layers.undo()
            self._layers = None
        self._clear_padding()
        if not self.graphs_failure:
            self._steps.forget()
            self._steps, self.limits, self._graphs = steps, limits, graphs
            self._adapter_graphs = adapted if may_adapt else None
            self.graphs_bytes = graphs.num_bytes + adapted.num_bytes

    def record_chains(
        self, what: str, make: Callable[[ExecutorLimits], C], run_pass: Callable[[C], RunPass] | None = None
    ) -> C | None:
        """Record passes that draw tokens and read them, as :attr:`limits` say.

        Args:
            what: They are, for the log.
            make: Makes what draws.
            run_pass: Of it, what runs the passes; by default the model does.

        Returns:
            What was made; None where such steps are not recorded, or cannot be.
        """
        if self.limits is None or not self.limits.num_chained_passes:
            return None
        failure = "" if self.states is None else "it has recurrent layers"
        if not failure:
            try:
                chooser = make(self.limits)
                run = partial(self._run, self._steps) if run_pass is None else run_pass(chooser)
                device, goes_on = self.loaded.device, run_pass is None
                chains = ChainGraphs(self._steps, run, chooser, self.limits, device, goes_on)
                failure = chains.record_all(self._is_trial)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = reason_of(error)
            self._clear_padding()
            self._steps.forget()
        if failure:
            logger.info("%s of %s are launched pass by pass: %s", what, self.loaded.name, failure)
            return None
        self._chains = chains
        self.graphs_bytes += chains.num_bytes + chooser.num_bytes
        return chooser

    def _clear_padding(self) -> None:
        for number, group in enumerate(self.pool.groups):
            self._cache.clear(number, [group.null_block])

    def forget_graphs(self) -> None:
        """Undo :meth:`record_graphs`: the model may get another runner."""
        if self._layers is not None:
            self._layers.undo()
        self._layers = self.limits = self._graphs = self._adapter_graphs = self._chains = None
        self._steps = Steps(self.pool, self.loaded.device)

    @torch.inference_mode()
    def _compile_layers(self, steps: Steps, limits: ExecutorLimits, backend: str | Callable[..., Any]) -> None:
        """Compile the layers by a step that is padding alone, of a size that no graph has: then it fits all sizes."""
        self.compile_failure = "" if self.loaded.adapters is None else "it may have adapters"
        if self.states is not None:
            self.compile_failure = "it has recurrent layers"
        if self.compile_failure:
            return
        size = min(limits.max_tokens, _COMPILED_TOKENS)
        some = torch.zeros(1, dtype=torch.int32, device=self.loaded.device)
        try:
            layers = CompiledLayers(self.loaded.model, backend, self._dependent_launches)
        except ValueError as error:
            self.compile_failure = reason_of(error)
            return
        try:
            self._run(steps, steps.derive(size), some)
        except Exception as error:  # of the compiler, or of what it has made
            self.graphs_failure = f"its layers cannot be compiled: {reason_of(error)}"
            layers.undo()
        else:
            self._layers = layers

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Within, steps and chains run operator by operator, whether they are recorded and compiled or not."""
        recorded = self._graphs, self._adapter_graphs, self._chains, self._layers
        try:
            with self.uncompiled():
                self._graphs = self._adapter_graphs = self._chains = self._layers = None
                yield
        finally:
            self._graphs, self._adapter_graphs, self._chains, self._layers = recorded

    def uncompiled(self) -> AbstractContextManager[None]:
        """Within, the model runs operator by operator, also where its layers are compiled."""
        return nullcontext() if self._layers is None else self._layers.not_used()

    def _used_adapters(
        self, rows: Sequence[RowInput], parts: Sequence[RowPart], num_tokens: int
    ) -> AbstractContextManager[None]:
        """Around a pass."""
        slots = self.loaded.adapters
        runs = [] if slots is None else adapter_runs(rows, parts)
        if slots is None or not runs:
            return nullcontext()
        return slots.used(runs, num_tokens, is_filled_up=self.tile_tokens is not None)

    def no_logits(self, num_rows: int) -> torch.Tensor:
        """Zeros that are laid out as the logits of :meth:`forward`."""
        shape = num_rows, self.loaded.vocab_size
        return self._finish(torch.zeros(shape, dtype=self.loaded.dtype, device=self.output_device))

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        if self._padding == "cut":
            return logits[:, : self._vocab_size].float()
        logits = logits.float()
        logits[:, self._vocab_size :] = float("-inf")
        return logits


def _make_kernel(name: str, dependent_launches: bool) -> MakeAttentionKernel:
    """What makes the attention kernels of a runner."""
    make_kernel = attention_kernel(name)
    if make_kernel is GatherAttention:
        return partial(GatherAttention, workspace=Workspace())
    options = {"dependent_launches": True} if dependent_launches else {}
    return partial(make_kernel, **options)


def choose_kernel(loaded: LoadedModel) -> str:
    """The best kernel for what the model's layers want and where they are."""
    fits = loaded.dtype in (torch.float32, torch.float16, torch.bfloat16) and find_spec("triton") is not None
    fits &= loaded.device.type == "cuda"
    for layer in loaded.attention_layers:
        fits &= layer.device.type == "cuda" and not layer.is_latent and max(layer.key_dim, layer.value_dim) <= 256
    if not fits or any(torch.cuda.get_device_capability(layer.device) < (8, 0) for layer in loaded.attention_layers):
        return "gather"
    return "triton"
