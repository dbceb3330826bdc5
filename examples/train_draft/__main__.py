"""Command line: ``python -m examples.train_draft --work FOLDER [command]``; without a command, the whole recipe.

Every command goes on where an earlier run of it stopped; one that has nothing left to do ends at once. On a CPU, glibc
gives the large buffers of every step back to the system and takes them again: with ``MALLOC_MMAP_THRESHOLD_`` and
``MALLOC_TRIM_THRESHOLD_`` set to 4294967296 training is about twice as fast.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specdec.demo
from cluster.models.demos import demo_folder, make_chat_target
from examples.train_draft import (
    chat,
    chat_drafters,
    checkpoints,
    corpus,
    distill,
    evaluate,
    heads,
    models,
    mutual,
    parallel_drafting,
    target,
    tokens,
)
from examples.train_draft.loop import Plan
from examples.train_draft.optimizers import Rates

DEMO = Path(specdec.demo.__path__[0])
STAGES = "3:6000,6:9000"
LONG = "--window-tokens 1024"
_DECAYED = "--start-from target --name target-final"
RECIPE = (
    "data",
    f"target --stages {STAGES} --window-tokens 256 --batch-size 8",
    f"target --stages {STAGES},12:12000",
    f"target --stages {STAGES},12:13500 {LONG} --batch-size 2 --decay-steps 1500 {_DECAYED}",
    f"draft --target target-final {LONG} --batch-size 3 --steps 8000",
    f"mutual --target target-final {LONG} --seed 3 --steps 1500 --decay-steps 600",
    "hybrid --steps 8000 --window-tokens 256 --batch-size 8",
    "hybrid --steps 9500 --window-tokens 256 --batch-size 8 --decay-steps 1500 --start-from hybrid --name hybrid-final",
    "export --target mutual-target --draft mutual-draft --hybrid hybrid-final",
    "heads --target {work}/pair/target --steps 3000 --decay-steps 600",
    "parallel_drafting --pair {work}/pair --steps 3000 --window-tokens 256 --batch-size 4 --decay-steps 600",
    "evaluate --pair {work}/pair",
    "evaluate --pair {work}/pair --target hybrid",
)
"""What makes the pair, command by command: short windows while the target is shallow, long ones at the end, for places
that no window reached are read badly (2.7 nats instead of 1.6 at the 500th token after windows of 256)."""
ROLES = ("target", "draft", "hybrid")
"""Folders of an export."""


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and runs one command."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision(options.matmul_precision or ("highest" if options.device == "cpu" else "high"))
    options.work.mkdir(parents=True, exist_ok=True)
    if options.command:
        options.run(options)
        return
    common = ["--work", str(options.work), "--threads", str(options.threads), "--device", options.device]
    common += ["--matmul-precision", options.matmul_precision] if options.matmul_precision else []
    for command in RECIPE:
        logging.info("== %s", command)
        step = parser.parse_args([*common, *(word.format(work=options.work) for word in command.split())])
        step.run(step)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_draft", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of token files and checkpoints")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--matmul-precision",
        choices=("highest", "high", "medium"),
        help="of float32 products (default: highest on a CPU, else high); medium is several times as fast with AMX",
    )
    commands = parser.add_subparsers(dest="command")
    data = commands.add_parser("data", help="make the tokenizer, if asked, and the token files")
    data.add_argument("--tokenizer", default=str(DEMO / "target"), help="folder of one to use, or 'new'")
    data.add_argument("--vocab-size", type=int, default=4096)
    data.add_argument("--max-package-chars", type=int, default=30_000_000)
    data.set_defaults(run=_data)
    trained = commands.add_parser("target", help="train the target, or go on")
    _add_training_flags(trained)
    trained.add_argument("--stages", type=target.parse_stages, default=target.parse_stages(f"{STAGES},12:12000"))
    trained.set_defaults(run=_target)
    hybrid = commands.add_parser("hybrid", help="train the hybrid target, or go on")
    _add_training_flags(hybrid)
    hybrid.add_argument("--steps", type=int, default=8000)
    hybrid.set_defaults(run=_hybrid)
    _add_draft_commands(commands)
    _add_heads(commands)
    exported = commands.add_parser("export", help="write models in bfloat16 as transformers loads them")
    for role in ROLES:
        exported.add_argument(f"--{role}", metavar="CHECKPOINT", help=f"name of the checkpoint that becomes {role}/")
    exported.add_argument("--out", type=Path, help="folder for these folders (default: pair, in the work folder)")
    exported.set_defaults(run=_export)
    judged = commands.add_parser("evaluate", help="figures of an exported pair on the held-out files")
    judged.add_argument("--pair", type=Path, default=DEMO, help="folder that holds target/, draft/ and hybrid/")
    judged.add_argument("--target", choices=("target", "hybrid"), default="target", help="the target looked at")
    judged.add_argument("--num-windows", type=int, default=evaluate.Extent().num_windows)
    judged.set_defaults(run=_evaluate)
    return parser


def _add_draft_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sampled = commands.add_parser("samples", help="let the target write text, for the draft to learn from too")
    sampled.add_argument("--target", default="target", help="name of the target's checkpoint")
    sampled.add_argument("--num-windows", type=int, default=1024)
    sampled.add_argument("--window-tokens", type=int, default=512)
    sampled.set_defaults(run=_samples)
    distilled = commands.add_parser("draft", help="distil the draft, or go on")
    _add_training_flags(distilled)
    distilled.add_argument("--target", default="target", help="name of the target's checkpoint")
    distilled.add_argument("--steps", type=int, default=6000)
    distilled.add_argument("--tv-weight", type=float, default=0.0, help="weight of the total variation beside the KL")
    distilled.set_defaults(run=_draft)
    mutually = commands.add_parser("mutual", help="let target and draft learn from each other, or go on")
    _add_training_flags(mutually)
    mutually.add_argument("--target", default="target", help="name of the checkpoint the target starts from")
    mutually.add_argument("--draft", default="draft", help="name of the checkpoint the draft starts from")
    mutually.add_argument("--steps", type=int, default=1000)
    exchange = mutual.Exchange()
    mutually.add_argument("--draft-share", type=float, default=exchange.draft_share, help="in what the target learns")
    mutually.add_argument("--tv-weight", type=float, default=exchange.tv_weight, help="in what the draft learns")
    mutually.add_argument("--target-rate", type=float, default=exchange.target_rate, help="over the draft's rates")
    mutually.set_defaults(run=_mutual)


def _add_heads(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trained = commands.add_parser("heads", help="train heads on a target, or go on; export and judge them")
    _add_training_flags(trained)
    trained.add_argument("--target", type=Path, default=DEMO / "target", help="folder of the exported target")
    trained.add_argument("--steps", type=int, default=3000)
    trained.add_argument("--num-windows", type=int, default=evaluate.Extent().num_windows)
    trained.set_defaults(run=_heads)
    whole = commands.add_parser(
        "parallel_drafting", help="teach a draft to give several tokens in one pass; export and judge it"
    )
    _add_training_flags(whole)
    whole.add_argument("--pair", type=Path, default=DEMO, help="folder of the exported target/ and draft/")
    whole.add_argument("--steps", type=int, default=3000)
    whole.add_argument("--num-windows", type=int, default=evaluate.Extent().num_windows)
    whole.set_defaults(run=_parallel_drafting)
    talks = commands.add_parser(
        "chat", help="let the chat demo's model write chats, and teach two layers of its own what it says; export them"
    )
    _add_training_flags(talks)
    talks.add_argument(
        "--target", type=Path, default=demo_folder("chat-target"), help="the model's folder; made where absent"
    )
    talks.add_argument("--num-chats", type=int, default=2048)
    talks.add_argument("--chats-at-once", type=int, default=chat.Writing(0).batch_size)
    talks.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="in which chats are written")
    talks.add_argument("--steps", type=int, default=3000)
    talks.set_defaults(run=_chat)
    beside = commands.add_parser(
        "chat_drafter", help="teach another drafter for the chat demo, from the chats that are written; export it"
    )
    beside.add_argument("kind", choices=get_args(chat_drafters.Kind))
    _add_training_flags(beside)
    for role in ("target", "draft"):
        beside.add_argument(f"--{role}", type=Path, default=demo_folder(f"chat-{role}"), help="the demo's own folder")
    beside.add_argument("--steps", type=int, default=1000)
    beside.set_defaults(run=_chat_drafter)


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    plan = Plan(num_steps=0)
    parser.add_argument("--name", help="checkpoint's name in the work folder (default: the command's)")
    parser.add_argument("--start-from", help="name of a checkpoint to copy, where --name has none yet")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and stop after this time")
    parser.add_argument("--decay-steps", type=int, default=0, help="last steps, over which the rates fall to zero")
    parser.add_argument("--batch-size", type=int, default=plan.batch_size)
    parser.add_argument("--micro-batch-size", type=int, default=plan.micro_batch_size)
    parser.add_argument("--window-tokens", type=int, default=plan.window_tokens)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--matrix-rate", type=float, default=Rates().matrices, help="learning rate of Muon")
    parser.add_argument("--warmup-steps", type=int, default=Rates().num_warmup_steps)
    parser.add_argument("--other-rate", type=float, default=Rates().others, help="learning rate of AdamW")


def _plan(options: argparse.Namespace, num_steps: int) -> Plan:
    return Plan(
        num_steps=num_steps,
        window_tokens=options.window_tokens,
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        seed=options.seed,
        num_decay_steps=options.decay_steps,
        deadline_s=time.monotonic() + options.minutes * 60,
    )


def _rates(options: argparse.Namespace) -> Rates:
    return Rates(options.matrix_rate, options.other_rate, num_warmup_steps=options.warmup_steps)


def _data(options: argparse.Namespace) -> None:
    if (options.work / "sources.json").exists():
        logging.info("the token files are there")
        return
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


def _path(options: argparse.Namespace, default: str) -> Path:
    """The checkpoint to go on with, copied from another one if that is asked for and it is not there."""
    path = options.work / f"{options.name or default}.pt"
    if options.start_from and not path.exists():
        checkpoints.copy(options.work / f"{options.start_from}.pt", path)
    return Path(path)


def _target(options: argparse.Namespace) -> None:
    text = tokens.TokenFile(options.work, "train").tokens
    plan = _plan(options, num_steps=options.stages[-1].last_step)
    path = _path(options, "target")
    target.train_target(text, models.TARGET, options.stages, plan, _rates(options), path, options.device)


def _hybrid(options: argparse.Namespace) -> None:
    text = tokens.TokenFile(options.work, "train").tokens
    stages = (target.Stage(models.HYBRID.num_layers, options.steps),)
    plan, path = _plan(options, options.steps), _path(options, "hybrid")
    target.train_target(text, models.HYBRID, stages, plan, _rates(options), path, options.device)


def _samples(options: argparse.Namespace) -> None:
    text = tokens.TokenFile(options.work, "train").tokens
    model = checkpoints.load(options.work / f"{options.target}.pt", options.device).model.eval()
    sampling = distill.Sampling(options.num_windows, options.window_tokens)
    distill.write_samples(model, text, sampling, options.work / "samples.bin")


def _draft(options: argparse.Namespace) -> None:
    text = tokens.TokenFile(options.work, "train").tokens
    model = checkpoints.load(options.work / f"{options.target}.pt", options.device).model
    written = options.work / "samples.bin"
    samples = distill.read_samples(written, options.window_tokens) if written.exists() else None
    plan, path = _plan(options, options.steps), _path(options, "draft")
    lesson = distill.Lesson(model, text, samples, options.tv_weight)
    distill.train_draft(lesson, models.DRAFT, plan, _rates(options), path, options.device)


def _mutual(options: argparse.Namespace) -> None:
    paths = []
    for role, start in (("target", options.target), ("draft", options.draft)):
        path = options.work / f"{options.name or 'mutual'}-{role}.pt"
        if not path.exists():
            # A phase of its own: its steps and its decay begin anew, the optimizers' state goes on.
            begun = checkpoints.load(options.work / f"{start}.pt")
            begun.step, begun.decay_start = 0, None
            checkpoints.save(begun, path)
        paths.append(path)
    exchange = mutual.Exchange(options.draft_share, options.tv_weight, options.target_rate)
    text, plan = tokens.TokenFile(options.work, "train").tokens, _plan(options, options.steps)
    mutual.train_mutually(text, exchange, plan, _rates(options), (paths[0], paths[1]), options.device)


def _heads(options: argparse.Namespace) -> None:
    text, plan = tokens.TokenFile(options.work, "train").tokens, _plan(options, options.steps)
    on = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).to(options.device)
    reached = heads.train_heads(on, text, models.HEADS, plan, _rates(options), _path(options, "heads"))
    heads.export_heads(reached.model, options.work / "pair" / "heads")
    extent = evaluate.Extent(num_windows=options.num_windows)
    held_out = tokens.TokenFile(options.work, "heldout").tokens
    figures = heads.evaluate_heads(reached.model.eval(), options.target, held_out, extent, options.device)
    logging.info("heads after %.2fM tokens\n%s", reached.num_tokens / 1e6, heads.table(figures))


def _parallel_drafting(options: argparse.Namespace) -> None:
    text, plan = tokens.TokenFile(options.work, "train").tokens, _plan(options, options.steps)
    on, draft = (
        AutoModelForCausalLM.from_pretrained(options.pair / role, dtype=torch.float32) for role in ("target", "draft")
    )
    masks, path = parallel_drafting.Masks(), _path(options, "parallel_drafting")
    reached = parallel_drafting.train_parallel_drafting(on, draft, text, masks, plan, _rates(options), path)
    tokenizer = AutoTokenizer.from_pretrained(options.pair / "draft")
    template = (options.pair / "target" / "chat_template.jinja").read_text()
    models.export(reached.model, tokenizer, options.work / "pair" / "parallel_drafting", template)
    held_out = tokens.TokenFile(options.work, "heldout").tokens
    extent = evaluate.Extent(num_windows=options.num_windows)
    figures = parallel_drafting.acceptance(reached.model, on, held_out, masks, extent)
    for temperature, kept in figures.items():
        shown = " / ".join(f"{share:.3f}" for share in kept.shares)
        logging.info(
            "one pass after %.2fM tokens, T=%g: %s, %.2f tokens a round",
            *(reached.num_tokens / 1e6, temperature, shown, kept.tokens_a_round),
        )


def _chat(options: argparse.Namespace) -> None:
    on, tokenizer = chat.load_target(make_chat_target(options.target)), AutoTokenizer.from_pretrained(options.target)
    writing = chat.Writing(options.num_chats, options.window_tokens, options.chats_at_once)
    chat.write_chats(on.to(getattr(torch, options.dtype)), tokenizer, writing, options.work)
    on = chat.load_target(options.target)
    chats = chat.read_chats(options.work, options.window_tokens, on.config.hidden_size)
    reached = chat.train_chat(on, chats, _plan(options, options.steps), _rates(options), _path(options, "chat"))
    chat.export_layers(reached.model, options.work / "pair" / "chat")
    for temperature, share in chat.acceptance(reached.model, on, chats).items():
        logging.info("chat draft after %.2fM tokens, T=%g: %.3f", reached.num_tokens / 1e6, temperature, share)


def _chat_drafter(options: argparse.Namespace) -> None:
    if not (options.draft / "config.json").is_file():
        raise SystemExit(f"chat_drafter: no draft in {options.draft}; run: specdec demo make chat")
    on, tokenizer = chat.load_target(make_chat_target(options.target)), AutoTokenizer.from_pretrained(options.target)
    draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=torch.float32)
    chats = chat.read_chats(options.work, options.window_tokens, on.config.hidden_size)
    plan = _plan(options, options.steps)
    chat_drafters.train(options.kind, on, draft, tokenizer, chats, plan, _rates(options), options.work)


def _export(options: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.work / "tokenizer")
    template = (DEMO / "target" / "chat_template.jinja").read_text()
    named = {role: getattr(options, role) for role in ROLES if getattr(options, role) is not None}
    if not named:
        raise SystemExit(f"export: name a checkpoint by one of {', '.join(f'--{role}' for role in ROLES)}")
    for role, name in named.items():
        model = checkpoints.load(options.work / f"{name}.pt").model
        models.export(model, tokenizer, (options.out or options.work / "pair") / role, template)
        logging.info("%s: %d parameters", role, models.num_parameters(model))


def _evaluate(options: argparse.Namespace) -> None:
    extent = evaluate.Extent(num_windows=options.num_windows)
    text = tokens.TokenFile(options.work, "heldout").tokens
    figures = evaluate.evaluate(options.pair / options.target, options.pair / "draft", text, extent, options.device)
    logging.info("%s\n%s", json.dumps(asdict(figures), indent=1), evaluate.table(figures))


if __name__ == "__main__":
    main()
