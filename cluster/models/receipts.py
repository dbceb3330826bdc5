"""What receipts say of a service's target, and whether it is one's own: by the configuration, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cluster.config.app import AppArgs
from cluster.models.sources import read_template, target_source
from specdec.checkpoint.fingerprint import content_hashes
from specdec.models.loading import load_config
from specdec.receipts.contract import Contract, numeric_contract
from specdec.receipts.issue import ReceiptIssuer, template_hash
from specdec.receipts.signing import load_signing_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def target_contract(args: AppArgs) -> Contract:
    """The numeric contract of the target if this process loaded it."""
    source = target_source(args)
    device = source.device
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    dtype: str = source.dtype
    if dtype == "auto":
        its_own = str(load_config(source).get_text_config(decoder=True).dtype or torch.float32)
        dtype = "float32" if device == "cpu" else its_own.removeprefix("torch.")
    tile_tokens = args.strict_tile_tokens if args.exactness == "strict" else None
    return numeric_contract(dtype, device, source.quantization, tile_tokens)


def receipt_issuer(args: AppArgs, tokenizer: PreTrainedTokenizerBase) -> ReceiptIssuer | None:
    """What signs a service's receipts; None where the configuration names no key.

    Raises:
        InvalidParameterError: The key cannot be read.
        ModelLoadError: The model cannot be read.
    """
    if args.receipts.key_file is None:
        return None
    source = target_source(args)
    weights, tokens = content_hashes(source.path, source.revision, source.token)
    template = read_template(args.chat_template) or getattr(tokenizer, "chat_template", None)
    key = load_signing_key(args.receipts.key_file)
    return ReceiptIssuer(key, weights, tokens, template_hash(template))
