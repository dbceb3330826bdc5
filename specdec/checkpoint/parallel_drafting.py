"""Whether a model was taught to give several tokens in one pass, by mask tokens in the place of all but the first.

An et al. 2025, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation". The checkpoints of its
authors (``amd/PARD-Llama-3.2-1B``, ``amd/PARD-Qwen3-0.6B``, ...) are causal language models as transformers saves them.
Their ``config.json`` has two fields more, which ``pard/pard_train.py`` of AMD-AGI/PARD sets: ``pard_token``, the mask
token's id, and ``spd_type``, ``pard``; -1 is no token. vLLM reads ``ptd_token_id``, too. How many tokens a pass was
taught to give is ``para_num`` of the training's own configuration, which no published checkpoint carries. Those of
PARD-2 (2605.08632; ``spd_type`` is ``pard2``) draft from tokens alone as well, without the projection of the target's
hidden states that lies beside their weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from specdec.core.errors import ModelLoadError

_MASK_TOKENS = ("pard_token", "ptd_token_id")
_PUBLISHED_TOKENS = 12
"""Of a pass of a checkpoint that does not say: ``draft_k`` of the authors' evaluation, and of vLLM's page on it."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """How many tokens a draft gives in a pass.

    Attributes:
        count: At most.
        mask_token_id: What it reads in the place of each but the first; None where it gives one.
        notes: What whoever runs it should know, a sentence each.
    """

    count: int = 1
    mask_token_id: int | None = None
    notes: tuple[str, ...] = ()


ONE_TOKEN = StepTokens()


def step_tokens(config: PretrainedConfig, name: str, wanted: int) -> StepTokens:
    """How many of the wanted tokens a draft gives in a pass.

    Args:
        config: Its text configuration.
        name: Of the model, for messages.
        wanted: Tokens of a pass; 1 has it draft token by token.

    Raises:
        ModelLoadError: Several are wanted, and it was not taught that, or names a mask token that it does not have.
    """
    named = (getattr(config, field, None) for field in _MASK_TOKENS)
    token = next((token for token in named if token is not None and token != -1), None)
    if wanted == 1:
        note = f"{name} was taught to give several tokens in a pass, and gives one without draft.parallel_drafting"
        return ONE_TOKEN if token is None else StepTokens(notes=(note,))
    if token is None:
        raise ModelLoadError(
            f"{name} gives a token a pass: its config.json names no mask token ({' or '.join(_MASK_TOKENS)})"
        )
    if not isinstance(token, int) or not 0 <= token < config.vocab_size:
        raise ModelLoadError(f"the mask token of {name} must be in [0, {config.vocab_size}), not {token}")
    taught = getattr(config, "para_num", None)
    most = _PUBLISHED_TOKENS if taught is None else taught
    if not isinstance(most, int) or most < 1:
        raise ModelLoadError(f"para_num of {name} must be at least 1, not {taught}")
    notes = []
    if wanted - 1 > most:
        why = f"as its authors run it: {name} names no para_num" if taught is None else f"as {name} was taught"
        notes.append(f"a pass gives {most} tokens, {why}; drafts of up to {wanted - 1} take several passes")
    if getattr(config, "spd_type", None) == "pard2":
        notes.append(f"{name} drafts from tokens alone: PARD-2 could read the target's hidden states, too")
    return StepTokens(min(wanted, most), token, tuple(notes))
