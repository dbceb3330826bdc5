"""When a sequence ends; applied token by token, so that nothing after its end is committed."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.protocol.messages import Finish
from specdec.sampling.params import SequenceSpec


def finish_reason(log_length_after: int, token: int, spec: SequenceSpec, max_model_len: int) -> Finish | None:
    """Why the sequence ends with this token, if it does: an ending token first, then length.

    Args:
        log_length_after: Length of the log, prompt and output, ``token`` included.
        token: The newest output token.
        spec: The sequence.
        max_model_len: Longest log, in tokens.

    Returns:
        ``stop`` for an end-of-sequence or stop token with at least ``min_tokens`` output tokens before it; ``length``
        at ``max_tokens`` or ``max_model_len``; else None.
    """
    _, finish = walk(log_length_after - 1, (token,), spec, max_model_len)
    return finish


def walk(tokens_before: int, run: Sequence[int], spec: SequenceSpec, max_model_len: int) -> tuple[int, Finish | None]:
    """How much of a run is committed, and how the sequence ends there.

    Args:
        tokens_before: Length of the log before the run; the sequence is not finished there.
        run: Decided tokens.
        spec: The sequence.
        max_model_len: Longest log, in tokens.

    Returns:
        Number of the run's tokens to commit, the finishing one included, and the reason, None if it goes on.
    """
    ending, least = spec.ending_token_ids, spec.output_start + spec.sampling.min_tokens
    most = min(spec.output_start + spec.max_tokens, max_model_len)
    for num_committed, token in enumerate(run, start=1):
        if token in ending and tokens_before + num_committed > least:
            return num_committed, "stop"
        if tokens_before + num_committed >= most:
            return num_committed, "length"
    return len(run), None


def finish_of_log(tokens: Sequence[int], spec: SequenceSpec, max_model_len: int) -> Finish | None:
    """How a log that was opened is finished already, if it is; the prompt's tokens end nothing.

    A prompt that leaves no room for a token is finished by ``length``.
    """
    _, finish = walk(spec.output_start, tokens[spec.output_start :], spec, max_model_len)
    if finish is None and (len(tokens) >= max_model_len or spec.max_tokens <= 0):
        return "length"
    return finish
