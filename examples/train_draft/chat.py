"""A draft for a chat model: two of its own layers, which learn what it says in chats that it writes itself.

A chat begins with one of the questions below. All else in it, the user's further turns too, is the target's own (as in
Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing"). The draft has
the target's embedding, which is not trained, so that its layers are all there is to ship.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from examples.train_draft import checkpoints, loop, models
from examples.train_draft.checkpoints import Checkpoint
from examples.train_draft.decode import scores
from examples.train_draft.distill import divergence
from examples.train_draft.loop import LossFunction, Plan
from examples.train_draft.optimizers import Rates
from specdec.sampling.noise import gumbel

logger = logging.getLogger(__name__)

FRAMES = (
    "What is {}?",
    "How does {} work?",
    "Why is {} important?",
    "Explain {} to a child.",
    "Explain {} in two sentences.",
    "Tell me a story about {}.",
    "Write a short poem about {}.",
    "Write a haiku about {}.",
    "List five facts about {}.",
    "What should a beginner know about {}?",
    "What are the advantages and disadvantages of {}?",
    "Give me three questions that I could ask an expert on {}.",
    "Write a friendly email to a colleague about {}.",
    "Summarize the history of {}.",
    "What is a common mistake with {}, and how can I avoid it?",
    "Compare {} with something similar.",
    "Write a Python program that has to do with {}.",
    "Give me a step-by-step plan to learn about {}.",
    "Who would be interested in {}, and why?",
    "Write a dialogue between two friends about {}.",
    "Describe {} as a table of two columns.",
    "Is {} good for people? Answer briefly.",
    "Make a title and an outline for an article about {}.",
    "Translate the sentence 'I like {}' into French and explain it.",
)
SUBJECTS = (
    "the blue sky, rain, the moon, gravity, electricity, a rainbow, volcanoes, the ocean, photosynthesis, "
    "a healthy breakfast, bread, coffee, tea, chocolate, cooking rice, growing tomatoes, gardening, bees, cats, "
    "dogs, elephants, birds, whales, dinosaurs, trees, mountains, rivers, deserts, the Arctic, football, chess, "
    "swimming, running, yoga, sleep, stress, friendship, happiness, courage, money, saving energy, solar panels, "
    "wind power, electric cars, bicycles, trains, airplanes, ships, bridges, the Roman Empire, ancient Egypt, "
    "the Renaissance, the French Revolution, the printing press, the compass, democracy, taxes, insurance, "
    "a job interview, a team meeting, time management, writing a letter, computers, the internet, encryption, "
    "databases, sorting numbers, a linked list, machine learning, robots, prime numbers, fractions, "
    "the Pythagorean theorem, probability, statistics, geometry, logic, music, the piano, the guitar, painting, "
    "photography, theatre, poetry, novels, languages, libraries, the heart, the brain, vitamins, vaccines, "
    "bacteria, DNA, evolution, cells, teeth, exercise, Paris, Japan, Brazil, Kenya, India, Canada, Australia, "
    "a city park, a small village, camping"
)
"""With a comma between them."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How the target writes chats."""

    num_chats: int
    num_tokens: int = 384
    batch_size: int = 32
    greedy_share: float = 0.5
    """Share of each batch whose answers are written at temperature 0; the others' are drawn at 1."""
    question_temperature: float = 0.7
    most_question_tokens: int = 48
    """Of a further turn of the user."""
    seed: int = 11


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats, and what the target made of them."""

    tokens: np.ndarray
    """uint16 [num_chats, num_tokens]."""
    answers: np.ndarray
    """Whether the assistant says a token, its end of turn included; bool [num_chats, num_tokens]."""
    hidden: np.ndarray
    """The target's hidden state of a token, after the last norm: float16 [num_chats, num_tokens, hidden_size]."""
    num_held_out: int = 32
    """The last chats, from which nothing is learned."""


_KINDS: tuple[tuple[str, type[np.generic]], ...] = (
    ("tokens", np.uint16),
    ("answers", np.bool_),
    ("hidden", np.float16),
)


def read_chats(folder: Path, num_tokens: int, hidden_size: int) -> Chats:
    """What :func:`write_chats` wrote."""
    shapes = {"hidden": (num_tokens, hidden_size)}
    parts = [
        np.memmap(_file(folder, name), dtype=dtype, mode="r").reshape(-1, *shapes.get(name, (num_tokens,)))
        for name, dtype in _KINDS
    ]
    return Chats(*parts, num_held_out=min(32, len(parts[0]) // 16))


def _file(folder: Path, name: str) -> Path:
    return folder / f"chat-{name}.bin"


class Turns:
    """Whose turn it is in each chat of a batch, and what is put in there: the question, and what the template adds.

    Args:
        tokenizer: Has the target's template.
        questions: The first turn of each chat.
        most_question_tokens: Tokens after which a further turn of the user ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, questions: Sequence[str], most_question_tokens: int) -> None:
        self._end: int = tokenizer.eos_token_id
        empty = [{"role": role, "content": ""} for role in ("user", "assistant", "user")]
        asked, answered, _ = tokenizer.apply_chat_template(empty, tokenize=False).split(tokenizer.eos_token)[1:4]
        begin = tokenizer.apply_chat_template(empty[:1], tokenize=False).rpartition(tokenizer.eos_token)[0]
        self._then = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (answered, asked)]
        self._put_in = [
            tokenizer(begin + question, add_special_tokens=False)["input_ids"] + [self._end, *self._then[0]]
            for question in questions
        ]
        self._most = most_question_tokens
        self._num_said = [0] * len(questions)
        self.is_answer = [True] * len(questions)

    def next_token(self, row: int, said: int) -> tuple[int, bool]:
        """What follows in a chat; whether the assistant says it.

        Args:
            row: Of the batch.
            said: What the target says there, if it is somebody's turn.
        """
        if self._put_in[row]:
            return self._put_in[row].pop(0), False
        is_answer = self.is_answer[row]
        self._num_said[row] += 1
        if not is_answer and self._num_said[row] == self._most:
            said = self._end
        if said == self._end:
            self.is_answer[row] = not is_answer
            self._put_in[row] = [*self._then[is_answer]]
            self._num_said[row] = 0
        return said, is_answer


@torch.no_grad()
def write_chats(target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, writing: Writing, folder: Path) -> None:
    """Appends chats to ``folder`` until it holds ``writing.num_chats`` of them; goes on at the next whole batch."""
    size, width = writing.batch_size, {"hidden": target.config.hidden_size}
    batch_bytes = {
        name: size * writing.num_tokens * width.get(name, 1) * np.dtype(dtype).itemsize for name, dtype in _KINDS
    }
    files = {name: _file(folder, name) for name in batch_bytes}
    done = min(file.stat().st_size // batch_bytes[name] if file.exists() else 0 for name, file in files.items())
    for number in range(done, -(-writing.num_chats // size)):
        parts = _write_batch(target, tokenizer, writing, writing.seed * 1_000_000 + number * size)
        for (name, path), part in zip(files.items(), parts, strict=True):
            with path.open("ab") as file:
                file.truncate(number * batch_bytes[name])
                file.write(part.tobytes())
        logger.info("chats %d/%d", (number + 1) * size, writing.num_chats)


def _write_batch(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, writing: Writing, first_seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size, length = writing.batch_size, writing.num_tokens
    draw = random.Random(first_seed)
    subjects = SUBJECTS.split(", ")
    questions = [draw.choice(FRAMES).format(draw.choice(subjects)) for _ in range(size)]
    turns, cache = Turns(tokenizer, questions, writing.most_question_tokens), DynamicCache()
    rows = torch.tensor([[turns.next_token(row, 0)[0]] for row in range(size)])
    answers = torch.zeros(size, length, dtype=torch.bool)
    hidden = torch.empty(size, length, target.config.hidden_size, dtype=torch.float16)
    num_greedy, seeds = int(size * writing.greedy_share), range(first_seed, first_seed + size)
    for place in range(length):
        states = target.model(rows[:, place:], past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        hidden[:, place] = states
        if place + 1 == length:
            break
        logits = target.lm_head(states).float()
        # Whose turn it is says at which temperature: of a further question, of a drawn answer, or 0.
        ways = [turns.is_answer[row] * (1 if row >= num_greedy else 2) for row in range(size)]
        said = torch.zeros(size, dtype=torch.int64)
        for way, temperature in enumerate((writing.question_temperature, 1.0, 0.0)):
            if own := [row for row in range(size) if ways[row] == way]:
                chosen = logits[own]
                if temperature:
                    noise = gumbel([seeds[row] for row in own], [place + 1] * len(own), chosen.shape[-1], rows.device)
                    chosen = scores(chosen, noise, temperature)
                said[own] = chosen.argmax(-1)
        column = []
        for row in range(size):
            token, answers[row, place + 1] = turns.next_token(row, int(said[row]))
            column.append([token])
        rows = torch.cat((rows, torch.tensor(column)), 1)
    return rows.numpy().astype(np.uint16), answers.numpy(), hidden.numpy()


def begin_draft(target: PreTrainedModel, num_layers: int = 2) -> PreTrainedModel:
    """The target's embedding and norm, its first layers, and its last one."""
    fields = target.config.to_dict() | {"num_hidden_layers": num_layers}
    draft = models.from_fields(fields)
    last = target.config.num_hidden_layers - 1
    sources = [*range(num_layers - 1), last]
    state = {name: tensor for name, tensor in target.state_dict().items() if ".layers." not in name}
    for i, source in enumerate(sources):
        part = target.model.layers[source].state_dict()
        state |= {f"model.layers.{i}.{name}": tensor for name, tensor in part.items()}
    draft.load_state_dict(state)
    return draft


def chat_loss(draft: PreTrainedModel, chats: Chats, vocabulary: Tensor) -> LossFunction:
    """Forward KL from what the target says to what the draft says, of tokens of ``vocabulary``, in answers alone.

    Args:
        draft: Has the target's embedding.
        chats: What the target wrote.
        vocabulary: Tokens that count, int64 [n]: a part of them all makes a step a fraction of the work.

    Returns:
        Of numbers of chats, int64 [B, 1].
    """
    weights = draft.lm_head.weight.detach()[vocabulary]

    def loss_of(chosen: Tensor) -> Tensor:
        which = chosen.flatten().numpy()
        tokens = torch.from_numpy(chats.tokens[which].astype(np.int64))
        counts = torch.from_numpy(chats.answers[which][:, 1:])
        states = draft.model(tokens[:, :-1], use_cache=False).last_hidden_state[counts]
        of_target = torch.from_numpy(chats.hidden[which][:, :-1].astype(np.float32))[counts]
        of_draft, of_teacher = (functional.log_softmax(one @ weights.T, -1) for one in (states, of_target))
        return divergence(of_draft, of_teacher, 0.0)[None]

    return loss_of


def train_chat(target: PreTrainedModel, chats: Chats, plan: Plan, rates: Rates, path: Path) -> Checkpoint:
    """Trains, or goes on training, the draft at ``path``."""
    checkpoint = checkpoints.load(path) if path.exists() else Checkpoint(begin_draft(target), {}, 0, 0, 0.0)
    checkpoint.model.get_input_embeddings().requires_grad_(False)
    num_chats = len(chats.tokens) - chats.num_held_out
    loss_of = chat_loss(checkpoint.model, chats, vocabulary_of(chats, target.config.vocab_size))
    source = numbers(num_chats, plan, checkpoint.step)
    loop.train([loop.Student(checkpoint, rates, path)], source, plan, loss_of)
    return checkpoint


def vocabulary_of(chats: Chats, vocab_size: int) -> Tensor:
    """Tokens that occur in chats more than once, int64 [n]."""
    return torch.from_numpy(np.flatnonzero(np.bincount(chats.tokens.reshape(-1), minlength=vocab_size) >= 2))


def numbers(num_chats: int, plan: Plan, num_batches: int) -> Iterator[Tensor]:
    """Numbers of chats, int64 [batch_size, 1], each once before any again."""
    epoch, rest = divmod(num_batches, num_chats // plan.batch_size)
    while True:
        order = torch.randperm(num_chats, generator=torch.Generator().manual_seed(plan.seed * 1000 + epoch))
        for batch in order.split(plan.batch_size)[rest : num_chats // plan.batch_size]:
            yield batch[:, None]
        epoch, rest = epoch + 1, 0


@torch.inference_mode()
def acceptance(draft: PreTrainedModel, target: PreTrainedModel, chats: Chats) -> dict[float, float]:
    """By temperature, the share of places in held-out answers where both, with the same noise, choose one token."""
    same: dict[float, list[Tensor]] = {0.0: [], 1.0: []}
    for number in range(len(chats.tokens) - chats.num_held_out, len(chats.tokens)):
        tokens = torch.from_numpy(chats.tokens[number].astype(np.int64))
        counts = torch.from_numpy(chats.answers[number][1:])
        of_draft = draft(tokens[None, :-1], use_cache=False).logits[0][counts].float()
        of_target = target.lm_head(torch.from_numpy(chats.hidden[number][:-1].astype(np.float32))[counts]).float()
        places = torch.arange(1, len(tokens))[counts].tolist()
        noise = gumbel([number] * len(places), places, target.config.vocab_size, tokens.device)
        for temperature, found in same.items():
            chosen = [scores(logits, noise, temperature).argmax(-1) for logits in (of_draft, of_target)]
            found.append(chosen[0] == chosen[1])
    return {temperature: float(torch.cat(found).float().mean()) for temperature, found in same.items()}


def export_layers(draft: PreTrainedModel, folder: Path) -> None:
    """Writes what the draft does not share with its target, in bfloat16, and its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = ("embed_tokens", "lm_head")
    own = {
        n: t.to(torch.bfloat16).contiguous() for n, t in draft.state_dict().items() if not any(s in n for s in shared)
    }
    save_file(own, folder / "layers.safetensors")
    fields = {name: value for name, value in draft.config.to_dict().items() if not name.startswith("_")}
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}, indent=2) + "\n")


def load_target(folder: Path) -> PreTrainedModel:
    """The target in float32, not to be trained."""
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return target.eval().requires_grad_(False)
