"""``specdec replay``: the answer of a receipt once more, and where it differs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cluster.cli.failures import EXIT_FAILED
from cluster.cli.flags import Parser, config_overrides
from cluster.cli.receipts import add_common_arguments, objects, open_answer, own_model, progress, public_key
from cluster.config.app import ServiceConfig
from cluster.config.files import load_config
from specdec.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from specdec.receipts.format import Receipt
    from specdec.receipts.replay import Rerun

USAGE = "RECEIPT [--url URL] [--config FILE.yaml] [--public-key FILE.pem] [KEY ...]"


def add_arguments(parser: Parser) -> None:
    """Its flags."""
    parser.add_argument("receipt", metavar="RECEIPT", help="JSON file with a receipt or an answer; - reads it")
    add_common_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print ``same``, or the first token of each choice that differs; returns 1 then."""
    from cluster.cli.service_rerun import ServiceRerun
    from specdec.receipts.replay import first_differences

    config = load_config(arguments.config, config_overrides(arguments))
    key = public_key(arguments, config)
    found, _ = open_answer(next(objects(arguments.receipt)), key)
    if arguments.url is None:
        check_replayable(found.receipt, config)
        rerun: Rerun = engine_rerun(config)
    else:
        rerun = ServiceRerun(arguments.url, arguments.api_key_file)
    differences = first_differences(found.receipt, rerun)
    signed = "signed" if found.is_signed else "its signature was not checked"
    if not differences:
        print(f"same ({found.receipt.id}, {signed})")
        return 0
    for one in differences:
        gap = "" if one.gap is None else f", logits {one.gap:.4g} apart"
        said, new = ("the end" if token is None else f"token {token}" for token in (one.said, one.found))
        print(f"choice {one.choice}, token {one.token}: the receipt has {said}, now {new}{gap}")
    return EXIT_FAILED


def check_replayable(receipt: Receipt, config: ServiceConfig) -> None:
    """Refuse a receipt of another model, or of other numerics.

    Raises:
        InvalidParameterError: So it is; it names what differs.
    """
    from specdec.receipts.contract import contract_difference

    own = own_model(config)
    if (receipt.model.weights, receipt.model.tokenizer) != own[:2]:
        its, mine = receipt.model, own
        text = f"the receipt names other weights or another tokenizer: {its.weights}, {its.tokenizer}, not {mine[:2]}"
        raise InvalidParameterError("receipt", text)
    if receipt.model.adapter:
        raise InvalidParameterError("receipt", "an answer with an adapter cannot be replayed here")
    difference = contract_difference(own.contract, receipt.contract)
    if difference:
        raise InvalidParameterError("receipt", f"numeric_contract: {difference}", "numeric_contract")


def engine_rerun(config: ServiceConfig) -> Rerun:
    """Generates with the target alone: its draft would change nothing."""
    from cluster.models.sources import backend_options, check_one_process, target_source
    from specdec.engine.engine import SpeculativeEngine
    from specdec.receipts.replay import EngineRerun

    check_one_process(config)
    options = backend_options(config, config.target)
    return EngineRerun(SpeculativeEngine.from_pretrained(target_source(config), options=options, progress=progress))
