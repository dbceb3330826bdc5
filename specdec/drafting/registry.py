"""Which methods draft without a draft model? The only list of them; nothing here imports torch."""

from __future__ import annotations

TOKEN_DRAFTERS: dict[str, str] = {
    "ngram": "specdec.drafting.ngram:drafter",
}
"""Methods that draft from a sequence's tokens: by the name in ``draft.method``, a function from the configuration to a
:data:`specdec.drafting.ngram.NewTokenDrafter`."""

HEADS: dict[str, str] = {
    "medusa": "specdec.drafting.medusa.heads:load",
    "eagle3": "specdec.drafting.eagle3.heads:load",
}
"""Methods that draft from the target's hidden states: by that name, the function that loads heads, as
:data:`specdec.drafting.heads.LoadHeads`."""
