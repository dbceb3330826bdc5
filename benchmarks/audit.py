"""How many honest tokens an audit takes, and within how many it finds what is not.

    OMP_NUM_THREADS=1 python -m benchmarks.audit --work FOLDER [--exactness strict] [--honest-tokens 100000]

The demo target goes on with beginnings of functions, many at once and with drafts looked up, and is audited: none of it
may be flagged. Then one token of each answer is edited: to any other one, or to the one that came second. Last, it
answers in other ways than its receipts say, and the tokens are counted until an answer shows it: at another
temperature, with rounded weights, or after training on this package's own source. Answers and models are kept in the
folder: what is there is not made again. Under ``strict`` the service and the auditor have the same bits; rounded
weights cannot, so that who cheats with those answers in fast steps.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM

import specdec
from cluster.models.demos import demo_folder
from specdec import BackendOptions, ModelSource, NgramOptions, SamplingParams, SpeculativeEngine
from specdec.core.params import SequenceSpec
from specdec.core.types import Quantization
from specdec.models.loading import load_tokenizer
from specdec.receipts.audit import Answer, Auditor, Own
from specdec.receipts.contract import numeric_contract
from specdec.receipts.format import LOGPROB_STRIDE, Receipt, ReceiptChoice, ReceiptModel
from specdec.receipts.scoring import Scorer
from specdec.sampling.noise import derive_seed

AT_ONCE, MAX_TOKENS, EOS, TILE_TOKENS = 64, 300, (0,), 16
SAID = SamplingParams(ignore_eos=True)
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")
OPTIONS = BackendOptions(
    vocab_size=4096, max_model_len=512, kv_cache_memory=256 << 20, measures_step=False, skip_parity_check=True
)


def source(dtype: str, quantization: Quantization = "none", folder: Path | None = None) -> ModelSource:
    """The demo target on the CPU, or what is made of it."""
    return ModelSource(str(folder or demo_folder("target")), dtype=dtype, device="cpu", quantization=quantization)


def make_engine(model: ModelSource, options: BackendOptions) -> SpeculativeEngine:
    """It, with drafts looked up."""
    return SpeculativeEngine.from_pretrained(model, None, ngram=NgramOptions(4), options=options)


def answers(engine: SpeculativeEngine, own: Own, seed: int, count: int, used: SamplingParams) -> list[Answer]:
    """Answers of one choice each whose receipts say ``SAID``, generated as ``used`` says and all at once."""
    tokenizer, used = load_tokenizer(source("float32")), replace(used, logprobs=0)
    prompts = [tuple(tokenizer.encode(f"def function_{seed}_{i}(values):\n")) for i in range(count)]
    specs = [
        (prompt, SequenceSpec(used, derive_seed(seed, i, 0), len(prompt), MAX_TOKENS, EOS, float(i)))
        for i, prompt in enumerate(prompts)
    ]
    model, found = ReceiptModel("demo", own.weights, own.tokenizer), []
    for i, result in enumerate(engine.generate_specs(specs)):
        logprobs = tuple(entry.logprob for entry in (result.logprobs or ())[::LOGPROB_STRIDE])
        said = derive_seed(seed, i, 0)
        choice = ReceiptChoice(i, said, MAX_TOKENS, result.token_ids, result.finish_reason, logprobs)
        receipt = Receipt(f"{seed}/{i}", 1, model, own.contract, SAID, seed, (), EOS, tuple(prompts), (choice,))
        found.append(Answer(receipt, {}))
    return found


def kept_answers(
    work: Path, kind: str, engine: Callable[[], SpeculativeEngine], own: Own, count: int, used: SamplingParams = SAID
) -> list[Answer]:
    """Answers of a kind from its file, and those that it lacks, generated ``AT_ONCE`` at a time."""
    file = work / f"{kind}.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    found = [Answer(msgspec.json.decode(line, type=Receipt), {}) for line in lines][:count]
    generating = engine() if len(found) < count else None
    while generating is not None and len(found) < count:
        start_s, seed = time.process_time(), len(found)
        new = answers(generating, own, seed, min(AT_ONCE, count - seed), used)
        with file.open("ab") as output:
            output.writelines(msgspec.json.encode(answer.receipt) + b"\n" for answer in new)
        found += new
        print(f"  {kind}: {len(found)} of {count} answers, {time.process_time() - start_s:.0f} s of CPU", flush=True)
    return found


def trained(work: Path, num_steps: int) -> Path:
    """The demo target after some steps of AdamW on the package's own source, 4 x 128 tokens each, at 1e-4.

    Weights are float32 meanwhile: in bfloat16 most steps would round to nothing.
    """
    folder = work / f"trained-{num_steps}"
    if (folder / "tokenizer.json").exists():
        return folder
    model = AutoModelForCausalLM.from_pretrained(demo_folder("target"), dtype=torch.float32)
    tokenizer = load_tokenizer(source("float32"))
    text = "".join(path.read_text() for path in sorted(Path(specdec.__path__[0]).rglob("*.py")))
    tokens = torch.tensor(tokenizer.encode(text))
    rows = tokens[: len(tokens) // 128 * 128].view(-1, 128)
    batches = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))].split(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for number, batch in enumerate(islice(cycle(batches), num_steps)):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 100 in (0, 99):
            print(f"  step {number + 1} of {num_steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edited(answer: Answer, choose: Callable[[ReceiptChoice, int], int], rng: random.Random) -> tuple[Answer, int]:
    """An answer with another token in one place, and that place."""
    (choice,) = answer.receipt.choices
    at = rng.randrange(len(choice.token_ids))
    ids = (*choice.token_ids[:at], choose(choice, at), *choice.token_ids[at + 1 :])
    other = msgspec.structs.replace(choice, token_ids=ids)
    return Answer(msgspec.structs.replace(answer.receipt, choices=(other,)), {}), at


def until_found(auditor: Auditor, given: Sequence[Answer]) -> str:
    """How soon answers show that they are not the model's."""
    verdicts, bounds = auditor.audit(given)
    found = sorted(one.token + 1 for one in verdicts if one.status == "flagged" and one.token is not None)
    middle = f", half of them within {found[len(found) // 2]} tokens" if found else ""
    num_tokens = sum(one.num_tokens for one in verdicts)
    return f"{len(found)} of {len(given)} answers ({num_tokens} tokens) flagged{middle}; {bounds}"


def edits_found(auditor: Auditor, scorer: Scorer, answers_: Sequence[Answer], kind: str) -> str:
    """How many edits are found, and found where they are."""

    def choose(choice: ReceiptChoice, at: int) -> int:
        token = choice.token_ids[at]
        if kind == "any":
            return rng.choice([other for other in range(OPTIONS.vocab_size or 0) if other != token])
        (receipt,) = (answer.receipt for answer in answers_ if answer.receipt.choices[0] is choice)
        best = scorer.score(receipt.spec(choice), receipt.prompts[choice.prompt], choice.token_ids).best[at]
        return int(best[1] if best[0] == token else best[0])

    rng = random.Random(0)
    changed = [edited(answer, choose, rng) for answer in answers_]
    verdicts, _ = auditor.audit([answer for answer, _ in changed])
    found = sum(one.status == "flagged" for one in verdicts)
    there = sum(one.token == at for one, (_, at) in zip(verdicts, changed, strict=True))
    return f"{found} of {len(changed)} found, {there} where they are"


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="for answers and models; one a contract"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--exactness", choices=("fast", "strict"), default="strict")
    parser.add_argument("--honest-tokens", type=int, default=100_000)
    parser.add_argument("--answers", type=int, default=AT_ONCE, help="that are not honest, of each kind")
    parser.add_argument("--steps", type=int, nargs="*", default=[100, 1000], help="of training")
    args = parser.parse_args()
    model, work = source(args.dtype), args.work
    work.mkdir(parents=True, exist_ok=True)
    options = replace(OPTIONS, strict_tile_tokens=TILE_TOKENS) if args.exactness == "strict" else OPTIONS
    own = Own("w", "t", numeric_contract(args.dtype, "cpu", strict_tile_tokens=options.strict_tile_tokens))
    scorer = Scorer.from_pretrained(model, options)
    auditor = Auditor(scorer, own)

    def say(kind: str, other: Callable[[], ModelSource] = lambda: model, used: SamplingParams = SAID) -> None:
        def engine() -> SpeculativeEngine:
            liar = other()
            return make_engine(liar, options if liar.quantization == "none" else OPTIONS)

        given = kept_answers(work, kind, engine, own, args.answers, used)
        print(f"{kind}: {until_found(auditor, given)}", flush=True)

    num_honest = -(-args.honest_tokens // MAX_TOKENS)
    honest = kept_answers(work, "honest", lambda: make_engine(model, options), own, num_honest)
    print(f"honest: {until_found(auditor, honest)}", flush=True)
    for kind in ("any", "second"):
        print(f"edits, {kind} token: {edits_found(auditor, scorer, honest[: args.answers], kind)}", flush=True)
    for temperature in (0.9, 0.8):
        say(f"temperature-{temperature}", used=replace(SAID, temperature=temperature))
    for quantization in QUANTIZATIONS:
        say(quantization, lambda: source("bfloat16", quantization))  # noqa: B023 - called at once
    for num_steps in args.steps:
        say(f"trained-{num_steps}", lambda: source(args.dtype, folder=trained(work, num_steps)))  # noqa: B023


if __name__ == "__main__":
    main()
