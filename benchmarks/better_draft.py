"""Whether training a draft on recorded answers pays, and for whom: ``python -m benchmarks.better_draft --work FOLDER``.

Own traffic: the demo pair as it is shipped, answers to Python code, six candidates of other rates, epochs and ranks.
A changed target: the demo's, fine-tuned on C++ headers; drafts that learned more and more of what it says, the same by
a plain loop in torch (a reference for ``specdec train-draft``), and one that learned tokens in another order. All are
tried on the tenth of prompts that is held out. A run goes on where it stopped. With ``--recorded`` the changed target's
answers are those that a service recorded.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import specdec.demo
from specdec import BackendOptions, ModelSource, SamplingParams, SpeculativeEngine
from specdec.audition.audition import audition_model
from specdec.audition.recording import Sample, read_recording, write_recording
from specdec.audition.report import Audition, verdict
from specdec.audition.training import TrainingPlan, split, train_draft

DEMO = Path(specdec.demo.__path__[0])
TARGET, DRAFT = DEMO / "target", DEMO / "draft"
CODE = "transformers/models/**/modeling_*.py"
HEADERS = "torch/include/**/*.h"
PROMPT_TOKENS = OUTPUT_TOKENS = 64
CHUNK = 100
HEAD = (
    "| candidate | tokens learned | right | tokens a round | ratio | p | better | CPU seconds |\n"
    "|---|---|---|---|---|---|---|---|"
)
LENGTH = 5
"""Draft tokens of a round."""
OPTIONS = BackendOptions(
    max_model_len=256, max_num_seqs=128, skip_parity_check=True, max_draft_tokens=16, measures_step=False
)
PLAN = TrainingPlan(batch_tokens=8 * (PROMPT_TOKENS + OUTPUT_TOKENS), learning_rate=1e-3, checkpoint_steps=20)
OWN_PLANS = {
    f"{'all weights' if not rank else f'LoRA of rank {rank}'}, rate {rate:g}, {epochs} epoch{'s' * (epochs > 1)}": plan
    for rank, rate, epochs in ((0, 1e-5, 1), (0, 1e-4, 1), (0, 1e-3, 1), (0, 1e-4, 2), (8, 1e-3, 1), (8, 5e-3, 1))
    for plan in [replace(PLAN, learning_rate=rate, num_epochs=epochs, lora_rank=rank)]
}


def source(path: Path) -> ModelSource:
    return ModelSource(str(path), dtype="float32", device="cpu")


def tokens_of(pattern: str, share: tuple[float, float], most: int) -> list[int]:
    """The first tokens of a share of installed files, in an order that a seed decides."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    files = sorted(Path(sysconfig.get_paths()["purelib"]).glob(pattern))
    random.Random(3).shuffle(files)
    tokens: list[int] = []
    for file in files[int(share[0] * len(files)) : int(share[1] * len(files))]:
        tokens += [*tokenizer(file.read_text("utf-8", "replace"))["input_ids"], 0]
        if len(tokens) > most:
            break
    return tokens[:most]


def fine_tuned(tokens: list[int], folder: Path) -> None:
    """Write a target that has read the tokens once, in windows of 256."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    windows = torch.tensor(tokens).unfold(0, 257, 256)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    steps = list(windows.split(8))
    checkpoint, num_done = folder.with_suffix(".pt"), 0
    if checkpoint.exists():
        num_done, weights, moments = torch.load(checkpoint)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    for number, step in list(enumerate(steps))[num_done:]:
        rate = 1e-3 * min(1, (number + 1) / 5, (len(steps) - number) / 20)
        loss = learn(model, optimizer, step, torch.ones(len(step), 256, dtype=torch.bool), rate)
        if number % 4 == 3:
            print(f"  fine-tuning, step {number + 1} of {len(steps)}: loss {loss:.3f}", file=sys.stderr, flush=True)
            torch.save((number + 1, model.state_dict(), optimizer.state_dict()), checkpoint)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)


def learn(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: torch.Tensor, is_output: torch.Tensor, rate: float
) -> float:
    """Make a step on rows of tokens, of which those count that are outputs; returns the loss."""
    logits = model(rows[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits[is_output], rows[:, 1:][is_output])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def record(target: Path, tokens: list[int], num_samples: int, folder: Path) -> list[Sample]:
    """Record what a target says at temperature 1 after pieces of the tokens."""
    chosen = random.Random(40)
    starts = [chosen.randrange(len(tokens) - PROMPT_TOKENS) for _ in range(num_samples)]
    folder.mkdir(exist_ok=True)
    for first in range(0, num_samples, CHUNK):
        file = folder / f"{first:05}.jsonl"
        if not file.exists():
            engine = SpeculativeEngine.from_pretrained(source(target), options=OPTIONS)
            prompts = [tokens[start : start + PROMPT_TOKENS] for start in starts[first : first + CHUNK]]
            sampling = SamplingParams(ignore_eos=True)
            results = engine.generate_batch(prompts, sampling, seed=first, max_tokens=OUTPUT_TOKENS)
            write_recording(file, [Sample.of(result) for result in results])
            print(f"  recorded {file}", file=sys.stderr, flush=True)
    return list(read_recording(folder))


def shuffled(samples: Sequence[Sample]) -> list[Sample]:
    """The samples that are learned with the tokens of each answer in another order; those held out as they are."""
    order = random.Random(5)
    learned, held_out = split(samples)
    return [
        *(
            replace(one, output_token_ids=tuple(order.sample(one.output_token_ids, len(one.output_token_ids))))
            for one in learned
        ),
        *held_out,
    ]


def by_plain_loop(samples: Sequence[Sample], folder: Path) -> None:
    """Train the draft as a few lines of torch do: batches of 8 in order, a constant rate after 10 steps."""
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    rows = torch.tensor([[*one.prompt_token_ids, *one.output_token_ids] for one in split(samples)[0]])
    is_output = torch.arange(rows.shape[1] - 1) >= PROMPT_TOKENS - 1
    for number, step in enumerate(rows.split(8)):
        learn(model, optimizer, step, is_output.expand(len(step), -1), 1e-3 * min(1.0, (number + 1) / 10))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DRAFT).save_pretrained(folder)


class Trial:
    """Candidates of one recording, each trained and tried once, beside the demo draft."""

    def __init__(self, folder: Path, target: Path, samples: Sequence[Sample]) -> None:
        self.folder, self.target, self.samples = folder, target, samples
        self.folder.mkdir(exist_ok=True)
        self._frozen: Audition | None = None

    def audition(self, draft: Path) -> Audition:
        """Try a draft on the samples held out."""
        return audition_model(split(self.samples)[1], source(self.target), source(draft), OPTIONS, [LENGTH])

    def row(self, name: str, samples: Sequence[Sample], plan: TrainingPlan | None) -> dict:
        """Train a candidate on samples, by the plan or by the plain loop, and try it."""
        out = self.folder / name.replace(" ", "_")
        file = self.folder / f"{out.name}.json"  # a rate has a dot: with_suffix would cut it off
        if not file.exists():
            shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped: its CPU seconds are lost
            started_s = time.process_time()
            if plan is None:
                by_plain_loop(samples, out)
            else:
                train_draft(samples, source(DRAFT), out, plan, lambda line: print(f"  {line}", file=sys.stderr))
            cpu_s = time.process_time() - started_s
            self._frozen = self._frozen or self.audition(DRAFT)
            tried = self.audition(out)
            found = verdict(self._frozen, tried, LENGTH)
            per_round = [one.total(LENGTH).tokens_per_round for one in (self._frozen, tried)]
            figures = {
                "tokens": sum(len(one.output_token_ids) for one in split(samples)[0]),
                "right": [self._frozen.right_share, tried.right_share],
                "per_round": per_round,
                "p": found.p_value,
                "is_better": found.is_better,
                "cpu_s": cpu_s,
            }
            file.write_text(json.dumps(figures))
        row = json.loads(file.read_text())
        cells = [
            name,
            f"{row['tokens']:,}",
            f"{row['right'][0]:.3f} to {row['right'][1]:.3f}",
            f"{row['per_round'][0]:.2f} to {row['per_round'][1]:.2f}",
            f"{row['per_round'][1] / row['per_round'][0]:.2f}",
            f"{row['p']:.4f}",
            "yes" if row["is_better"] else "no",
            f"{row['cpu_s']:.0f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        return row


def check_texts(target: Path, drafts: Sequence[Path], samples: Sequence[Sample]) -> None:
    """See that seeded texts are the same with every draft."""
    for draft in drafts:
        engine = SpeculativeEngine.from_pretrained(source(target), source(draft), options=OPTIONS)
        results = engine.generate_specs([(one.prompt_token_ids, one.spec()) for one in samples])
        assert [one.token_ids for one in results] == [one.output_token_ids for one in samples], draft


def try_own(work: Path, num_samples: int) -> None:
    """Try candidates for the shipped pair, and print their table."""
    samples = record(TARGET, tokens_of(CODE, (0, 1), 200_000), num_samples, work / "of_shipped")
    print(f"own traffic, {len(split(samples)[1])} samples held out\n\n{HEAD}")
    own = Trial(work / "own", TARGET, samples)
    rows = [own.row(name, samples, plan) for name, plan in OWN_PLANS.items()]
    print(f"\n{sum(row['is_better'] for row in rows)} of {len(rows)} are better\n")


def try_changed(folder: Path, target: Path, samples: Sequence[Sample]) -> None:
    """Try drafts that learn more and more of what a changed target says, and print their table."""
    learned, held_out = split(samples)
    print(f"a changed target, {len(held_out)} samples held out\n\n{HEAD}")
    trial = Trial(folder, target, samples)
    for share in (4, 2, 1):
        row = trial.row(f"train-draft, 1 of {share}", [*learned[: len(learned) // share], *held_out], PLAN)
    plain = trial.row("plain loop", samples, None)
    trial.row("tokens in another order", shuffled(samples), PLAN)
    ratios = [one["per_round"][1] / one["per_round"][0] for one in (row, plain)]
    print(f"\ntrain-draft over the frozen draft: {ratios[0]:.2f}; over the plain loop: {ratios[0] / ratios[1]:.2f}")
    check_texts(target, [DRAFT, trial.folder / "train-draft,_1_of_1"], samples[:32])
    print("32 seeded texts are the same with the frozen draft and with the trained one")


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and recordings")
    parser.add_argument("--num-samples", type=int, default=700, help="answers that are recorded of each target")
    parser.add_argument("--recorded", type=Path, help="the changed target's answers; nothing else is tried")
    parser.add_argument("--num-windows", type=int, default=352, help="windows of 256 tokens to fine-tune the target on")
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    changed = work / "target"
    if not (changed / "tokenizer.json").exists():
        fine_tuned(tokens_of(HEADERS, (0, 0.7), options.num_windows * 256 + 1), changed)
    if options.recorded is not None:
        try_changed(work / "recorded", changed, list(read_recording(options.recorded)))
    else:
        samples = record(changed, tokens_of(HEADERS, (0.7, 1), 200_000), options.num_samples, work / "of_changed")
        try_own(work, options.num_samples)
        try_changed(work / "changed", changed, samples)


if __name__ == "__main__":
    main()
