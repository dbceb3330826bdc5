"""Sampling kernels: the noise of the CPU bit for bit, the tokens of the rule in torch, and times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.device import read_bandwidth, seconds
from benchmarks.gpu.report import MissingError, Report
from specdec.kernels.sample import NUM_ACCEPTED, SampleStep, thresholds
from specdec.sampling.noise import gumbel

_POSITIONS = (0, 1, 100_000, 2**31 - 1)
MOST_US = 60.0


@dataclass(frozen=True)
class Sizes:
    """What is run: rows, tokens of the vocabulary, drafts of a sequence."""

    num_rows: int
    vocab_size: int
    num_drafts: int


FULL, SMALL = Sizes(64, 128_256, 7), Sizes(4, 1000, 1)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Check noise and decisions, and time a step of 64 rows."""
    try:
        from specdec.kernels.triton.sample import TritonSampler
    except ImportError as error:
        raise MissingError(f"Triton: {error}") from None
    n, v = sizes.num_rows, sizes.vocab_size
    positions = torch.tensor([*_POSITIONS, *range(7, 7 + n)][:n], dtype=torch.int32)
    seeds = torch.tensor([i * 0x9E3779B97F4A7C15 % 2**63 for i in range(n)])
    noise = gumbel(seeds.tolist(), positions.tolist(), v, "cpu")
    step = make_step(n, 0, v, seeds, positions, device)
    scores = torch.empty(n, v, device=device)
    sampler = TritonSampler(v, n, n, 1, device)
    flags = {"penalties": False, "truncation": False}
    sampler.decide(torch.zeros(n, v, device=device), step, noise=True, scores=scores, **flags)
    report.check("noise of the kernel is that of the CPU, bit by bit", torch.equal(scores.cpu(), noise))

    logits = 4 * torch.randn(n, v, generator=torch.Generator().manual_seed(2))
    for name, top_k, top_p, scale in (
        ("plain", 0, 1.0, 1.0),
        ("top_k, top_p", 50, 0.9, 1.0),
        ("top_p over many", 0, 0.9, 0.1),
    ):
        step = make_step(n, 0, v, seeds, positions, device, top_k, top_p)
        is_cut, own = top_p < 1, logits * scale
        sampler.decide(own.to(device), step, noise=True, **flags | {"truncation": is_cut})
        scaled = own - own.amax(1, keepdim=True)
        if is_cut:
            least = thresholds(scaled, *(getattr(step, field).cpu() for field in ("top_k", "top_p", "min_p")))
            scaled = scaled.masked_fill(scaled < least[:, None], -math.inf)
        chosen = (scaled + noise).argmax(1)
        report.check(f"tokens are the rule's: {name}", torch.equal(sampler.chosen[:n].cpu().long(), chosen))

    per = 1 + sizes.num_drafts
    drafted = make_step(n // per, sizes.num_drafts, v, seeds[: n // per], positions[: n // per], device)
    rows = n // per * per
    walker = TritonSampler(v, rows, n // per, 1 << (per - 1).bit_length(), device)
    walker.decide(logits[:rows].to(device), drafted, noise=False, **flags)
    drafts = walker.chosen[:rows].view(-1, per)[:, :-1].clone()
    drafted.draft.view(-1, per)[:, 1:] = drafts
    walker.decide(logits[:rows].to(device), drafted, noise=False, **flags)
    accepted = walker.record[: n // per, NUM_ACCEPTED].tolist()
    report.check("drafts that are the rule's are accepted", accepted == [sizes.num_drafts] * (n // per), str(accepted))

    on_device = logits.to(device)
    least_s = on_device.nbytes / read_bandwidth(device)
    for name, options in (
        ("T=0", {"noise": False}),
        ("T=1", {"noise": True}),
        ("T=1, top_p", {"noise": True, "truncation": True}),
        ("T=1, top_p, penalties", {"noise": True, "truncation": True, "penalties": True}),
    ):
        step = make_step(n, 0, v, seeds, positions, device, 0, 0.9 if "top_p" in name else 1.0)
        spent = seconds(lambda s=step, o=options: sampler.decide(on_device, s, **flags | o), device)  # type: ignore[misc]
        report.figure(f"sampling {n} rows, {name}, us", spent * 1e6, most=MOST_US)
    report.figure("sampling, logits read once, us", least_s * 1e6)
    # Nearly all tokens are as likely: more candidates than the quick way to cut them holds.
    flat, options = 0.01 * on_device, {"noise": True, "truncation": True}
    for rows in (1, n):
        step = make_step(rows, 0, v, seeds[:rows], positions[:rows], device, 0, 0.9)
        spent = seconds(lambda s=step, r=rows: sampler.decide(flat[:r], s, **flags | options), device)  # type: ignore[misc]
        report.figure(f"sampling {rows} rows, flat, T=1, top_p, us", spent * 1e6)


def make_step(
    num_sequences: int,
    num_drafts: int,
    vocab_size: int,
    seeds: Tensor,
    positions: Tensor,
    device: torch.device,
    top_k: int = 0,
    top_p: float = 1.0,
) -> SampleStep:
    """Sequences with chains of drafts, all of temperature 1.

    Args:
        num_sequences: R.
        num_drafts: Of each.
        vocab_size: V.
        seeds: int64 [R].
        positions: int32 [R], of each sequence's first row.
        device: Where its tensors are.
        top_k: Of all; 0 for none.
        top_p: Of all; 1 for none.
    """
    per, r = 1 + num_drafts, num_sequences
    place = torch.arange(per).repeat(r)
    sequence = torch.arange(r).repeat_interleave(per)
    index = torch.arange(r * per)

    def int32(values: Tensor | int, *shape: int) -> Tensor:
        tensor = values if isinstance(values, Tensor) else torch.full(shape, values)
        return tensor.to(device, torch.int32)

    return SampleStep(
        sequence=int32(sequence),
        position=int32(positions[sequence] + place),
        draft=int32(torch.where(place > 0, 0, -1)),
        parent=int32(torch.where(place > 0, index - 1, -1)),
        first=int32(torch.arange(r) * per),
        count=int32(per, r),
        seed=seeds.to(device),
        temperature=torch.ones(r, device=device),
        top_k=int32(top_k, r),
        top_p=torch.full((r,), top_p, dtype=torch.float64, device=device),
        min_p=torch.full((r,), -math.inf, device=device),
        slot=int32(torch.arange(r)),
        penalties=torch.tensor([1.1, 0.1, 0.1], device=device).expand(r, 3).contiguous(),
        counts=int32(0, r, vocab_size),
        prompt_bits=int32(0, r, -(-vocab_size // 32)),
        ahead=int32(0, r * per, 0),
        bias_token=int32(0, r, 0),
        bias=torch.zeros(r, 0, device=device),
        allowed=int32(-1, r),
        grammar=int32(-1, r * per),
        masks=int32(0, 0, 1),
        ended=int32(0, r * per, 0),
        bad=int32(0, r * per, 0),
    )
