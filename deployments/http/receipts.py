"""The receipt of an answer: to the client whole, to the log by its id and hash alone."""

from __future__ import annotations

import logging
from dataclasses import replace

from deployments.http.generation import Generation
from deployments.http.job import Job
from deployments.http.schemas.chat import ChatBody
from deployments.http.writing import Json
from specdec.receipts.contract import told_contract
from specdec.receipts.format import Receipt, ReceiptChoice, ReceiptModel, sealed
from specdec.receipts.issue import ReceiptIssuer, template_hash

logger = logging.getLogger("ray.serve")


def receipt_of(job: Job, issuer: ReceiptIssuer, generation: Generation, head: Json) -> Json:
    """The envelope of an answer's receipt, when all its choices have ended.

    Args:
        job: What was asked.
        issuer: Signs.
        generation: With a record of each choice.
        head: The answer's ``id`` and ``created``.
    """
    template = job.body.chat_template if isinstance(job.body, ChatBody) else None
    adapter = job.model.adapter
    choices = []
    for number, (request, record) in enumerate(zip(job.sequences, generation.records, strict=True)):
        assert record.finish is not None, "its choices have ended"
        choices.append(
            ReceiptChoice(
                number // job.num_samples,
                request.spec.seed,
                request.spec.max_tokens,
                tuple(record.token_ids),
                record.finish,
                tuple(record.logprobs),
            )
        )
    receipt = Receipt(
        id=head["id"],
        created=head["created"],
        model=ReceiptModel(
            job.model.name,
            issuer.weights,
            issuer.tokenizer,
            template_hash(template) if template else issuer.chat_template,
            "" if adapter is None else adapter.fingerprint,
        ),
        contract=told_contract(record.numeric for record in generation.records),
        # What is reported decides nothing.
        sampling=replace(job.sequences[0].spec.sampling, logprobs=None, prompt_logprobs=None),
        seed=job.seed,
        stop=job.stops,
        eos_token_ids=job.model.eos_token_ids,
        prompts=job.prompts,
        choices=tuple(choices),
    )
    envelope, sha256 = sealed(receipt, issuer.key)
    logger.info("receipt request_id=%s sha256=%s", job.context.label, sha256)
    return envelope
