"""Which methods draft from the target's hidden states? The only list of them; nothing here imports torch."""

from __future__ import annotations

HEADS: dict[str, str] = {
    "medusa": "specdec.drafting.medusa.heads:load",
    "eagle3": "specdec.drafting.eagle3.heads:load",
}
"""By the name in ``draft.method``, the function that loads heads, as :data:`specdec.drafting.heads.LoadHeads`."""
