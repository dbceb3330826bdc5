import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_draft import (
    checkpoints,
    decode,
    distill,
    evaluate,
    heads,
    loop,
    models,
    mutual,
    parallel_drafting,
    target,
    tokens,
)
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.corpus import Document
from examples.train_draft.distill import Lesson, Sampling
from examples.train_draft.loop import Plan
from examples.train_draft.models import Shape
from examples.train_draft.optimizers import Rates
from specdec.drafting.medusa.heads import HeadsConfig, load
from specdec.models.loading import prepare_model
from specdec.sampling.noise import gumbel

SHAPE = Shape(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, vocab_size=64, max_positions=64)
PLAN = Plan(num_steps=0, window_tokens=8, batch_size=4, micro_batch_size=2, save_every_s=0.0, log_every_steps=1)
RATES = Rates(num_warmup_steps=2)
pytestmark = pytest.mark.whole
STAGES = target.parse_stages("1:3,2:6")


@pytest.fixture
def text():
    return np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint16) // 8


def test_a_run_stopped_after_every_step_ends_with_the_same_weights(tmp_path, text):
    plan = replace(PLAN, num_decay_steps=2)
    whole = target.train_target(text, SHAPE, STAGES, plan, RATES, tmp_path / "whole.pt")
    for step in range(1, 7):
        stopped = replace(plan, deadline_s=0.0)
        parts = target.train_target(text, SHAPE, STAGES, stopped, RATES, tmp_path / "parts.pt")
        assert parts.step == step
    assert whole.step == 6
    assert whole.model.config.num_hidden_layers == 2
    assert whole.num_tokens == parts.num_tokens == 6 * 4 * 8
    torch.testing.assert_close(whole.model.state_dict(), parts.model.state_dict(), rtol=0, atol=0)
    stored = checkpoints.load(tmp_path / "parts.pt")
    torch.testing.assert_close(whole.model.state_dict(), stored.model.state_dict(), rtol=0, atol=0)


def test_growing_keeps_the_optimizers_state_of_the_layers_it_had(tmp_path, text):
    grown = target.train_target(text, SHAPE, STAGES, PLAN, RATES, tmp_path / "target.pt")
    num_updates = [int(grown.optimizers[f"model.layers.{i}.input_layernorm.weight"]["step"]) for i in range(2)]
    assert num_updates == [6, 3]


def test_a_crash_while_saving_leaves_the_old_checkpoint(tmp_path, text):
    path = tmp_path / "target.pt"
    target.train_target(text, SHAPE, STAGES[:1], PLAN, RATES, path)
    checkpoint = checkpoints.load(path)
    checkpoint.optimizers = {"x": {"unsaveable": lambda: None}}
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        checkpoints.save(checkpoint, path)
    assert checkpoints.load(path).step == 3


def test_training_lowers_the_loss(tmp_path, text):
    plan = replace(PLAN, batch_size=8, micro_batch_size=8, window_tokens=16)
    windows = next(tokens.batches(text, 16, 32, seed=5))
    before = loop.next_token_loss(models.build(SHAPE, plan.seed))(windows).item()
    after = target.train_target(text, SHAPE, target.parse_stages("1:30"), plan, RATES, tmp_path / "t.pt").model
    # Eight tokens are left of 64, all equally likely: ln 8 = 2.08 is the least.
    assert before > 4
    assert 2.0 < loop.next_token_loss(after)(windows).item() < 2.5


@pytest.mark.parametrize("wrong", ["3", "3:100,4:200", "3:100,6:100", "a:1", ""])
def test_wrong_stages_are_refused(wrong):
    with pytest.raises(ValueError, match="stages must"):
        target.parse_stages(wrong)


def test_the_decay_ends_near_zero_and_only_its_steps_are_slower():
    scales = [Rates(num_warmup_steps=2).scale(step, 6, 4) for step in range(10)]
    assert scales[:6] == [0.5, 1, 1, 1, 1, 1]
    assert scales[6:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_windows_go_on_where_they_stopped_and_cover_the_text():
    text = np.arange(101, dtype=np.uint16)
    whole = [w.tolist() for w in islice(tokens.windows(text, 10, seed=1), 25)]
    assert [w.tolist() for w in islice(tokens.windows(text, 10, seed=1, start=13), 12)] == whole[13:]
    epoch = sorted(whole[:9])
    assert [w[0] for w in epoch] == list(range(epoch[0][0], epoch[0][0] + 90, 10))
    assert all(len(w) == 11 for w in whole)
    with pytest.raises(ValueError, match="at least 20"):
        next(tokens.windows(text[:15], 10, seed=1))


def test_the_draft_learns_the_target_and_resumes_exactly(tmp_path, text):
    teacher = target.train_target(text, SHAPE, STAGES, PLAN, RATES, tmp_path / "target.pt").model
    path = tmp_path / "samples.bin"
    sampling = Sampling(8, window_tokens=8, num_prompt_tokens=3, batch_size=4, greedy_share=0.5)
    distill.write_samples(teacher, text, sampling, path)
    lesson = Lesson(teacher, text, distill.read_samples(path, 8), tv_weight=0.5)
    plan = replace(PLAN, num_steps=5)
    whole = distill.train_draft(lesson, SHAPE, plan, RATES, tmp_path / "whole.pt")
    for _ in range(5):
        parts = distill.train_draft(lesson, SHAPE, replace(plan, deadline_s=0.0), RATES, tmp_path / "parts.pt")
    torch.testing.assert_close(whole.model.state_dict(), parts.model.state_dict(), rtol=0, atol=0)
    windows = next(tokens.batches(text, 8, 16, seed=5))
    losses = [
        distill.distillation_loss(model, teacher, 1.0)(windows).item()
        for model in (teacher, whole.model, models.build(SHAPE, plan.seed))
    ]
    assert losses[0] == pytest.approx(0, abs=1e-6)
    assert losses[0] < losses[1] < losses[2]


def test_samples_of_an_interrupted_run_are_completed(tmp_path, text):
    teacher = models.build(SHAPE, seed=0).eval()
    sampling = Sampling(8, window_tokens=8, num_prompt_tokens=3, batch_size=4, greedy_share=0.5)
    distill.write_samples(teacher, text, sampling, tmp_path / "whole.bin")
    half = (tmp_path / "whole.bin").read_bytes()[:100]
    (tmp_path / "parts.bin").write_bytes(half)
    distill.write_samples(teacher, text, sampling, tmp_path / "parts.bin")
    assert (tmp_path / "parts.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    assert distill.read_samples(tmp_path / "parts.bin", 8).shape == (8, 9)


def test_the_share_of_greedy_batches():
    sampling = Sampling(8, greedy_share=0.25)
    assert [sampling.temperature(i) for i in range(8)] == [1, 1, 1, 0, 1, 1, 1, 0]
    assert {Sampling(8, greedy_share=0.0).temperature(i) for i in range(8)} == {1.0}
    assert {Sampling(8, greedy_share=1.0).temperature(i) for i in range(8)} == {0.0}


def test_token_files_hold_the_documents(tmp_path):
    documents = [Document("package", f"m{i}.py", f"value_{i} = {i}\n" * 3) for i in range(40)]
    tokenizer = tokens.train_tokenizer((d.text for d in documents), vocab_size=300)
    sources = tokens.write_tokens(documents, tokenizer, tmp_path)
    files = {split: tokens.TokenFile(tmp_path, split) for split in ("train", "heldout")}
    assert [(s.package, s.num_files) for s in sources] == [("package", 40)]
    assert sum(len(f.tokens) for f in files.values()) == sources[0].num_tokens
    texts = {f"{d.package}/{d.path}": d for d in documents}
    for split, file in files.items():
        assert len(file.paths) > 0
        for i, path in enumerate(file.paths):
            assert texts[path].held_out is (split == "heldout")
            assert tokenizer.decode(file.document(i)) == texts[path].text


def test_a_model_agrees_with_itself_on_text_and_on_what_it_writes(tmp_path, text):
    model = target.train_target(text, SHAPE, STAGES, PLAN, RATES, tmp_path / "t.pt").model
    tokenizer = tokens.train_tokenizer(["x = 1\n"], vocab_size=300)
    models.export(model, tokenizer, tmp_path / "target")
    extent = evaluate.Extent(3, 16, 4, num_prompt_tokens=5, num_generated_tokens=6, temperatures=(0.0, 1.0))
    figures = evaluate.evaluate(tmp_path / "target", tmp_path / "target", text, extent)
    assert [(a.text, a.temperature) for a in figures.agreements] == [
        ("held-out", 0.0),
        ("held-out", 1.0),
        ("own", 0.0),
        ("own", 1.0),
    ]
    assert [a.num_positions for a in figures.agreements] == [36, 36, 18, 18]
    assert all(a.acceptance == 1.0 and a.best_possible == pytest.approx(1.0) for a in figures.agreements)
    assert figures.target_loss == figures.draft_loss
    assert evaluate.table(figures).count("\n") == 5


def test_written_text_follows_the_coupled_noise(tmp_path):
    model = models.build(SHAPE, seed=0).eval()
    prompts = torch.randint(8, (2, 5))
    written = decode.generate(model, prompts, [20000, 20001], 4, 1.0)
    noise = gumbel([20000, 20001], [7, 7], 64, "cpu")
    expected = (model(written[:, :7]).logits[:, -1].log_softmax(-1) + noise).argmax(-1)
    assert written.shape == (2, 9)
    assert torch.equal(written[:, 7], expected)


def test_target_and_draft_learn_from_each_other_and_resume_exactly(tmp_path, text):
    target.train_target(text, SHAPE, STAGES, PLAN, RATES, tmp_path / "whole-target.pt")
    target.train_target(text, replace(SHAPE, hidden_size=8), STAGES[:1], PLAN, RATES, tmp_path / "whole-draft.pt")
    for role in ("target", "draft"):
        begun = checkpoints.load(tmp_path / f"whole-{role}.pt")
        begun.step, begun.decay_start = 0, None
        for run in ("whole", "parts"):
            checkpoints.save(begun, tmp_path / f"{run}-{role}.pt")
    plan, windows = replace(PLAN, num_steps=6, num_decay_steps=2), next(tokens.batches(text, 8, 16, seed=5))

    def train(run, plan):
        paths = (tmp_path / f"{run}-target.pt", tmp_path / f"{run}-draft.pt")
        return [c.model for c in mutual.train_mutually(text, mutual.Exchange(), plan, RATES, paths)]

    def distance(pair):
        return distill.distillation_loss(pair[1], pair[0], 0.0)(windows).item()

    before = [checkpoints.load(tmp_path / f"whole-{role}.pt").model for role in ("target", "draft")]
    whole = train("whole", plan)
    for _ in range(6):
        parts = train("parts", replace(plan, deadline_s=0.0))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert distance(whole) < distance(before)


@pytest.mark.parametrize("num_files", range(8))
def test_a_pair_goes_on_in_step_wherever_its_saving_is_killed(tmp_path, monkeypatch, text, num_files):
    """A saving writes two files and renames two; the second one is killed, or the third, after so many of them."""

    class KilledError(Exception):
        pass

    def kill_after(count, function):
        def counted(*args):
            if not count:
                raise KilledError
            count.pop()
            return function(*args)

        return counted

    def train(run):
        paths = tmp_path / f"{run}-target.pt", tmp_path / f"{run}-draft.pt"
        return mutual.train_mutually(text, mutual.Exchange(), replace(PLAN, num_steps=3), RATES, paths)

    for run in ("whole", "killed"):
        for seed, role in enumerate(("target", "draft")):
            started = Checkpoint(models.build(SHAPE, seed), {}, 0, 0, 0.0)
            checkpoints.save(started, tmp_path / f"{run}-{role}.pt")
    count = [None] * (4 + num_files)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", kill_after(count, torch.save))
        patch.setattr(Path, "replace", kill_after(count, Path.replace))
        with pytest.raises(KilledError):
            train("killed")
    for one, other in zip(train("whole"), train("killed"), strict=True):
        assert one.step == other.step == 3
        torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("left", [None, b"", b"PK half of a file"])
def test_a_pair_that_is_out_of_step_is_refused(tmp_path, text, left):
    paths = tmp_path / "target.pt", tmp_path / "draft.pt"
    for step, path in zip((5, 3), paths, strict=True):
        checkpoints.save(Checkpoint(models.build(SHAPE, 0), {}, step, 0, 0.0), path)
    if left is not None:
        (tmp_path / "draft.partial").write_bytes(left)
    with pytest.raises(ValueError, match=r"draft\.pt is at step 3, and what was trained with it at step 5"):
        mutual.train_mutually(text, mutual.Exchange(), PLAN, RATES, paths)


def test_what_one_learns_gives_the_other_no_gradients():
    pair = [models.build(SHAPE, seed).eval() for seed in (0, 1)]
    windows = next(tokens.batches(np.arange(64, dtype=np.uint16) % 8, 8, 2, seed=5))
    for number in range(2):
        losses = mutual.mutual_loss(*pair, mutual.Exchange(draft_share=1.0))(windows)
        losses[number].backward()
        mine, others = (pair[i].model.embed_tokens.weight.grad for i in (number, 1 - number))
        assert mine.any()
        assert not others.any()
        for model in pair:
            model.zero_grad(set_to_none=True)


def test_heads_learn_what_the_target_says_later_and_resume_exactly_and_are_read_by_the_service(tmp_path, text):
    on = models.build(SHAPE, 1)
    config = HeadsConfig(SHAPE.hidden_size, SHAPE.vocab_size, 2, medusa_fc_bias=True, original_lm_head=True)
    plan = replace(PLAN, num_steps=30)
    windows = torch.from_numpy(text[:90].astype(np.int64)).view(10, 9)
    fresh = models.from_fields(config.to_dict())
    before = float(heads.heads_loss(fresh, on)(windows).detach())
    whole = heads.train_heads(on, text, config, plan, RATES, tmp_path / "heads.pt")
    assert float(heads.heads_loss(whole.model, on)(windows).detach()) < 0.9 * before
    for _ in range(30):
        parts = heads.train_heads(on, text, config, replace(plan, deadline_s=0.0), RATES, tmp_path / "parts.pt")
    torch.testing.assert_close(whole.model.state_dict(), parts.model.state_dict(), rtol=0, atol=0)
    heads.export_heads(whole.model, tmp_path / "heads")
    loaded = load(str(tmp_path / "heads"), prepare_model(on, "tiny"))
    hidden = torch.randn(3, SHAPE.hidden_size)
    want = on.lm_head(whole.model.to(torch.bfloat16).float().states(hidden))
    torch.testing.assert_close(loaded.all_logits(hidden), want)


def test_a_draft_learns_what_the_target_says_in_the_place_of_masks_and_resumes_exactly(tmp_path, text):
    on, draft, masks = (
        models.build(SHAPE, 1),
        models.build(SHAPE, 2),
        parallel_drafting.Masks(num_masks=2, num_anchors=2),
    )
    plan = replace(PLAN, num_steps=30)
    windows = torch.from_numpy(text[:90].astype(np.int64)).view(10, 9)
    fresh = parallel_drafting.with_mask_token(draft)
    before = float(parallel_drafting.parallel_drafting_loss(fresh, on, masks)(windows).detach())
    whole = parallel_drafting.train_parallel_drafting(on, draft, text, masks, plan, RATES, tmp_path / "draft.pt")
    assert float(parallel_drafting.parallel_drafting_loss(whole.model, on, masks)(windows).detach()) < 0.9 * before
    for _ in range(30):
        stopped = replace(plan, deadline_s=0.0)
        parts = parallel_drafting.train_parallel_drafting(on, draft, text, masks, stopped, RATES, tmp_path / "parts.pt")
    torch.testing.assert_close(whole.model.state_dict(), parts.model.state_dict(), rtol=0, atol=0)


@torch.inference_mode()
def test_masks_in_training_say_what_they_say_in_a_pass_of_their_own(text):
    draft, masks = (
        parallel_drafting.with_mask_token(models.build(SHAPE, 2)),
        parallel_drafting.Masks(num_masks=3, num_anchors=2),
    )
    draft.load_state_dict({name: torch.randn_like(tensor) * 0.1 for name, tensor in draft.state_dict().items()})
    window = torch.from_numpy(text[:12].astype(np.int64))
    anchors, sees = masks.layout(len(window), 1)
    assert anchors.tolist() == [1, 5]
    logits = parallel_drafting.packed_logits(draft, window[None], anchors, sees, masks.num_masks)[0]
    for i, anchor in enumerate(anchors.tolist()):
        alone = torch.cat((window[: anchor + 1], torch.full((masks.num_masks,), draft.config.pard_token)))
        want = draft(alone[None], use_cache=False).logits[0, anchor + 1 :]
        of_anchor = logits[len(window) + i * masks.num_masks :][: masks.num_masks]
        torch.testing.assert_close(of_anchor, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logits[: len(window)], draft(window[None], use_cache=False).logits[0], rtol=1e-4, atol=1e-4
    )


def test_more_passes_begin_where_little_is_kept():
    easy, hard = torch.ones(4, 3, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64)
    kept = parallel_drafting.kept_of([torch.cat((easy, hard))])
    assert kept.shares == [0.5] * 3
    assert kept.tokens_a_round == 8 / 5, "one pass over what is easy, and one for each token that is hard"
