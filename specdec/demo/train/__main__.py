"""Command line: ``python -m specdec.demo.train {data,target,...} --work FOLDER``."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from specdec.demo.train import corpus, models, target, tokens
from specdec.demo.train.loop import Plan
from specdec.demo.train.optimizers import Rates

DEMO = Path(__file__).parents[1]
STAGES = "3:1200,6:2000,12:6000"


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and runs one command."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m specdec.demo.train", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of token files and checkpoints")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--device", default="cpu")
    commands = parser.add_subparsers(required=True)
    data = commands.add_parser("data", help="make the tokenizer, if asked, and the token files")
    data.add_argument("--tokenizer", default=str(DEMO / "target"), help="folder of one to use, or 'new'")
    data.add_argument("--vocab-size", type=int, default=4096)
    data.add_argument("--max-package-chars", type=int, default=12_000_000)
    data.set_defaults(run=_data)
    trained = commands.add_parser("target", help="train the target, or go on")
    _add_training_flags(trained)
    trained.add_argument("--stages", type=target.parse_stages, default=target.parse_stages(STAGES))
    trained.set_defaults(run=_target)
    return parser


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    plan = Plan(num_steps=0)
    parser.add_argument("--name", help="checkpoint's name in the work folder (default: the command's)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and stop after this time")
    parser.add_argument("--decay-steps", type=int, default=0, help="last steps, over which the rates fall to zero")
    parser.add_argument("--batch-size", type=int, default=plan.batch_size)
    parser.add_argument("--micro-batch-size", type=int, default=plan.micro_batch_size)
    parser.add_argument("--window-tokens", type=int, default=plan.window_tokens)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")


def _plan(options: argparse.Namespace, num_steps: int) -> Plan:
    return Plan(
        num_steps=num_steps,
        window_tokens=options.window_tokens,
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        seed=options.seed,
        num_decay_steps=options.decay_steps,
        time_limit_s=options.minutes * 60,
    )


def _rates(options: argparse.Namespace) -> Rates:
    rates = Rates()
    return replace(rates, matrices=rates.matrices * options.rate, others=rates.others * options.rate)


def _data(options: argparse.Namespace) -> None:
    packages = [corpus.standard_library(), *corpus.installed_packages()]
    found = list(corpus.documents(packages, options.max_package_chars))
    if options.tokenizer == "new":
        texts = (document.text for document in found if not document.held_out)
        tokenizer = tokens.train_tokenizer(texts, options.vocab_size)
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    tokenizer.save_pretrained(options.work / "tokenizer")
    sources = tokens.write_tokens(found, tokenizer, options.work)
    licenses = {package.name: package.license for package in packages}
    tokens.write_sources(sources, licenses, options.work / "sources.json")
    logging.info("%d files, %.2fM tokens", len(found), sum(s.num_tokens for s in sources) / 1e6)


def _target(options: argparse.Namespace) -> None:
    path = options.work / f"{options.name or 'target'}.pt"
    text = tokens.TokenFile(options.work, "train")
    plan = _plan(options, num_steps=0)
    target.train_target(text, models.TARGET, options.stages, plan, _rates(options), path)


if __name__ == "__main__":
    main()
