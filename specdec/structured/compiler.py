"""Grammars compiled for one tokenizer, beside whoever needs them, and kept."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from specdec.core.errors import InvalidParameterError, ServiceUnavailableError, reason_of
from specdec.core.grammar import Grammar, check_length, llguidance_grammar
from specdec.core.types import Tokens
from specdec.structured.trial import takes_too_much

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_KEPT = 512
_MOST_MESSAGE_CHARACTERS = 500
_STACK_BYTES = 32 << 20
"""Of the threads that compile: it stands whatever :mod:`specdec.structured.trial` lets through."""
_NUM_THREADS = 3
_LIMITS = LLParserLimits(max_grammar_size=100_000, verbose_errors=False)
"""Bounds on time and memory, to compile as well as to find a mask; the rest is llguidance's own."""

GrammarKey = tuple[Grammar, Tokens]


class Grammars:
    """Compiles grammars in threads of its own; keeps what somebody holds, and the 512 used last. For any thread.

    Args:
        tokenizer: A fast one; with another every grammar is refused.
        vocab_size: V, the tokens that a mask tells of.
        eos_token_ids: The model's; what is needed for them is made now, as it takes a second for a large vocabulary.
        tries_first: Whether grammars are of strangers: each is first compiled in a process whose time is bounded.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Tokens = (),
        *,
        tries_first: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._tries_first = tries_first
        self._special_tokens = frozenset(tokenizer.get_added_vocab())
        self._tokenizers: dict[Tokens, LLTokenizer] = {}
        self._compiled: OrderedDict[GrammarKey, Future[LLMatcher]] = OrderedDict()
        self._held = WeakValueDictionary[GrammarKey, Future[LLMatcher]]()
        self._awaited: Counter[GrammarKey] = Counter()
        self._lock = threading.Lock()
        self._threads = _compile_threads()
        if eos_token_ids:
            with suppress(ValueError):  # the tokenizer is not a fast one: whoever asks for a grammar gets an error
                self._tokens(eos_token_ids)

    def compiled(self, grammar: Grammar, eos_token_ids: Tokens) -> Future[LLMatcher]:
        """A matcher at the grammar's beginning, to be copied; it is queued now, or was before.

        Its exception is an InvalidParameterError for ``grammar``, which says what is wrong with it; or a
        ServiceUnavailableError where it could not be tried, which says nothing of it and is not given again.
        """
        try:
            check_length(grammar)
        except ValueError as error:  # not kept, as what is kept is bounded by number
            refused: Future[LLMatcher] = Future()
            refused.set_exception(_invalid(str(error)))
            return refused
        key = grammar, eos_token_ids
        with self._lock:
            future = self._compiled.pop(key, None) or self._held.get(key)
            if future is None or was_not_tried(future):
                future = self._threads.submit(self._compile, grammar, eos_token_ids)
            self._compiled[key] = self._held[key] = future
            while len(self._compiled) > _MOST_KEPT:
                self._compiled.popitem(last=False)
        return future

    @contextmanager
    def awaited(self, grammar: Grammar, eos_token_ids: Tokens) -> Iterator[Future[LLMatcher]]:
        """What :meth:`compiled` gives, for as long as somebody waits: what nobody waits for any more is not begun."""
        key = grammar, eos_token_ids
        with self._lock:
            self._awaited[key] += 1
        future = self.compiled(grammar, eos_token_ids)
        try:
            yield future
        finally:
            with self._lock:
                self._awaited[key] -= 1
                if not self._awaited[key]:
                    del self._awaited[key]
                    if future.cancel():
                        self._compiled.pop(key, None)

    def check(self, grammar: Grammar) -> None:
        """Compile it, if that was not done yet.

        Raises:
            InvalidParameterError: It cannot be compiled, within what it may cost.
            ServiceUnavailableError: It cannot be tried now.
        """
        self.compiled(grammar, self.eos_token_ids).result()

    def _compile(self, grammar: Grammar, eos_token_ids: Tokens) -> LLMatcher:
        if not eos_token_ids:
            raise _invalid("the model has no end-of-sequence token, with which a text could end")
        if self._tries_first and self._takes_too_much(grammar):
            raise _invalid("it takes too much time or memory to compile")
        try:
            text = llguidance_grammar(grammar, self._special_tokens)
            matcher = LLMatcher(self._tokens(eos_token_ids), text, log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first mask may ask for more than the limits allow
        except (ValueError, TypeError, RecursionError) as error:
            raise _invalid(str(error)) from error
        except BaseException as error:  # a panic of llguidance's is no Exception
            raise _invalid(f"llguidance failed: {error}") from error
        if matcher.is_error():
            raise _invalid(matcher.get_error())
        return matcher

    def _takes_too_much(self, grammar: Grammar) -> bool:
        if grammar.kind in ("json_object", "choice"):
            return False
        try:
            return takes_too_much(llguidance_grammar(grammar))
        except (ValueError, TypeError, RecursionError):
            return False  # it is wrong, which whoever compiles it will say
        except OSError as error:
            raise ServiceUnavailableError(f"the grammar cannot be tried now: {reason_of(error)}") from error

    def _tokens(self, eos_token_ids: Tokens) -> LLTokenizer:
        made = self._tokenizers.get(eos_token_ids)
        if made is None:
            made = from_tokenizer(self._tokenizer, n_vocab=self.vocab_size, eos_token=list(eos_token_ids))
            self._tokenizers[eos_token_ids] = made
        return made


def _compile_threads() -> ThreadPoolExecutor:
    """Start a pool's threads now, as new threads take the size of their stacks from a setting of the process."""
    pool, together = ThreadPoolExecutor(_NUM_THREADS, "grammars"), threading.Barrier(_NUM_THREADS)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for begun in [pool.submit(together.wait) for _ in range(_NUM_THREADS)]:
            begun.result()
    finally:
        threading.stack_size(before)
    return pool


def was_not_tried(future: Future[LLMatcher]) -> bool:
    """Whether it says nothing of the grammar, which is to be asked for again."""
    return future.cancelled() or (future.done() and isinstance(future.exception(), ServiceUnavailableError))


def _invalid(reason: str) -> InvalidParameterError:
    reason = reason.strip()
    if len(reason) > _MOST_MESSAGE_CHARACTERS:
        reason = f"{reason[:_MOST_MESSAGE_CHARACTERS]}..."
    return InvalidParameterError("grammar", f"the grammar cannot be used: {reason}")
