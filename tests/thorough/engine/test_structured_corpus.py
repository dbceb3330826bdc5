"""Over many schemas (208 in full): every output is valid, or a valid beginning, however it was drafted and batched."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

import pytest

from specdec.engine.engine import InProcessService
from specdec.engine.results import SpecStats
from specdec.sampling.kept import WhileAlive
from specdec.sampling.rows import RowGroup
from specdec.structured import matchers as matchers_module
from specdec.structured.matchers import Matchers
from tests.sizes import sized, some
from tests.specdec.engine.controlled import ControlledService
from tests.specdec.engine.pairs import Case, Output, collect
from tests.specdec.engine.schemas import grammar_of, is_valid, make_schemas
from tests.thorough.engine.test_structured import (
    MAX_TOKENS,
    PAIRS,
    PROMPTS,
    backends_of,
    engine_of,
    matcher_source,
    matchers_of,
    sampling,
    tokenizer,
)

Length = int | Literal["auto"]
TEMPERATURES = (0.0, 1.0)
LENGTHS: tuple[Length, ...] = sized((4, "auto"), (0, 1, 4, 8, "auto"))
SIZES = (1, 16)
SCHEMAS = make_schemas(sized(32, 208))
NUM_DRAWN = sized(2, 4)
"""Cells of each schema."""
SHORT, EVERY = 6, sized(13, 17)
"""Of so many outputs one has few tokens, to be cut off."""


class Cell(NamedTuple):
    """How a schema's output is made: K draft tokens a round, so many sequences at a time."""

    temperature: float
    length: Length
    pair: str
    size: int


CELLS = [Cell(*values) for values in product(TEMPERATURES, LENGTHS, PAIRS, SIZES)]
CHOSEN = sized([("plain", 1.0), ("hybrid", 0.0)], list(product(PAIRS, TEMPERATURES)))
"""Pairs and temperatures."""


@cache
def service_of(pair: str, is_controlled: bool) -> InProcessService:
    """Over the same models, each by itself; what is in the corpus is compiled, as ``collect`` counts rounds."""
    backends = backends_of(engine_of(pair))
    if is_controlled:
        return ControlledService(*backends)
    for matchers in matchers_of(engine_of(pair)):
        for schema in SCHEMAS:
            matchers._grammars.check(grammar_of(schema))
    return InProcessService(*backends, 4)


def case_of(number: int, cell: Cell) -> Case:
    params = sampling(cell.temperature, SCHEMAS[number])
    length = None if cell.length == "auto" else cell.length
    prompt = tuple(tokenizer().encode(PROMPTS[number % 2]))
    max_tokens = SHORT if number % EVERY == 0 else MAX_TOKENS
    return Case(prompt, max_tokens, params, number, length, eos_token_ids=(0,))


def outputs_of(cell: Cell, numbers: Sequence[int]) -> dict[int, Output]:
    """Of some schemas, so many at a time as the cell says: the last of them beside others of the corpus."""
    service, found = service_of(cell.pair, cell.length == "auto"), dict[int, Output]()
    for start in range(0, len(numbers), cell.size):
        chosen = list(numbers[start : start + cell.size])
        others = (number for number in range(len(SCHEMAS)) if number not in chosen)
        chosen += [next(others) for _ in range(cell.size - len(chosen))]
        found |= zip(chosen, collect(service, [case_of(number, cell) for number in chosen]), strict=True)
    return found


def check(number: int, output: Output) -> None:
    """What ended parses and is valid; what was cut off is a beginning that the grammar accepts."""
    assert output.finish in ("stop", "length"), f"an error: {output}"
    if output.finish == "stop":
        text = tokenizer().decode(output.tokens, skip_special_tokens=True)
        assert is_valid(SCHEMAS[number], text), f"not valid: {text} by {SCHEMAS[number]}"
        return
    matcher = matcher_source().compiled(grammar_of(SCHEMAS[number]), (0,)).result().deep_copy()
    assert matcher.try_consume_tokens(output.tokens) == len(output.tokens)


def check_cells(wanted: dict[Cell, list[int]]) -> Counter[str]:
    """Check schemas, by cell, against the same seeds plainly decoded; gives what was seen.

    No draft that a grammar forbids is proposed: masks are in both models, and follow what the drafter takes back.
    """
    plain: dict[tuple[float, str], dict[int, Output]] = {}
    by_model: defaultdict[tuple[float, str], set[int]] = defaultdict(set)
    for cell, numbers in wanted.items():
        by_model[cell.temperature, cell.pair].update(numbers)
    for (temperature, pair), chosen in by_model.items():
        plain[temperature, pair] = outputs_of(Cell(temperature, 0, pair, 16), sorted(chosen))
    seen: Counter[str] = Counter()
    for cell, numbers in wanted.items():
        in_target, _ = matchers_of(engine_of(cell.pair))
        before = in_target.num_forbidden_draft_tokens
        for number, output in outputs_of(cell, numbers).items():
            if number not in numbers:
                continue
            check(number, output)
            assert output.tokens == plain[cell.temperature, cell.pair][number].tokens, f"{number} differs in {cell}"
            seen[output.finish or ""] += 1
            seen["drafted"] += sum(output.notes.num_drafted)
            if cell.length == "auto":
                seen.update(f"auto {length}" for length in output.notes.num_drafted)
        assert in_target.num_forbidden_draft_tokens == before, f"forbidden drafts in {cell}"
    assert seen["stop"] >= 0.9 * (seen["stop"] + seen["length"]), seen
    return seen


def cells_of(pair: str, temperature: float) -> list[Cell]:
    return [cell for cell in CELLS if (cell.pair, cell.temperature) == (pair, temperature)]


def drawn_cells() -> dict[Cell, list[int]]:
    """Cells for each schema, of two pairs and temperatures, as each needs a run without drafts."""
    numbers: defaultdict[Cell, list[int]] = defaultdict(list)
    for number in range(len(SCHEMAS)):
        rng = random.Random(number)
        for pair, temperature in rng.sample(CHOSEN, 2):
            for cell in rng.sample(cells_of(pair, temperature), NUM_DRAWN // 2):
                numbers[cell].append(number)
    return {cell: numbers[cell] for cell in CELLS}


@pytest.mark.parametrize(("pair", "temperature"), CHOSEN)
def test_each_schema_in_some_cells(pair: str, temperature: float) -> None:
    drawn = drawn_cells()
    assert sum(map(len, drawn.values())) == NUM_DRAWN * len(SCHEMAS)
    seen = check_cells({cell: drawn[cell] for cell in cells_of(pair, temperature)})
    assert seen["length"] > 0
    assert seen["drafted"] > sized(100, 1_000)
    assert len([name for name in seen if name.startswith("auto")]) > sized(1, 4), "the controller has changed nothing"


@pytest.mark.whole
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", some(TEMPERATURES))
@pytest.mark.parametrize("pair", PAIRS)
def test_each_schema_in_all_cells(pair: str, temperature: float) -> None:
    cells = cells_of(pair, temperature)
    seen = check_cells({cell: list(range(len(SCHEMAS))) for cell in cells})
    print(f"{len(SCHEMAS)} schemas in {len(cells)} cells: {dict(seen)}")


FEW = list(range(1, sized(17, 33)))


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_masks_in_both_models_waste_no_draft(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against masks in the target alone: the same texts, and no fewer drafts kept."""
    cell = Cell(temperature, 4, "plain", 16)
    in_target, in_draft = matchers_of(engine_of("plain"))

    def run() -> tuple[list[list[int]], float, int]:
        before = in_target.num_forbidden_draft_tokens
        outputs = outputs_of(cell, FEW)
        for number, output in outputs.items():
            check(number, output)
        stats = sum((SpecStats.of([output.notes]) for output in outputs.values()), SpecStats())
        forbidden = in_target.num_forbidden_draft_tokens - before
        return [output.tokens for output in outputs.values()], stats.num_tokens / stats.num_rounds, forbidden

    both, with_both, num_forbidden = run()
    assert num_forbidden == 0
    in_draft_model = backends_of(engine_of("plain"))[1]._sampler
    monkeypatch.setattr(in_draft_model, "masked", list)
    monkeypatch.setattr(in_draft_model, "forced", lambda *_: ())
    alone, with_one, num_forbidden = run()
    assert num_forbidden > 0
    assert both == alone
    assert with_both > with_one
    assert in_draft.num_forbidden_draft_tokens == 0


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Matchers that a mutation has spoilt are not left to other tests."""
    yield
    for pair in PAIRS:
        for matchers in matchers_of(engine_of(pair)):
            matchers._kept = WhileAlive()


def few_cells(pair: str, temperature: float) -> dict[Cell, list[int]]:
    return {Cell(temperature, 8, pair, 16): FEW[:16]}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_drafter_whose_matchers_do_not_go_back_is_found_out(
    pair: str, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    """What it has read of a chain that was refused must go, or its masks are those of another text."""
    check_cells(few_cells(pair, 1.0))
    monkeypatch.setattr(matchers_module, "common_prefix_length", lambda read, output, *_: min(len(read), len(output)))
    with pytest.raises(AssertionError, match="forbidden drafts"):
        check_cells(few_cells(pair, 1.0))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_a_target_whose_matchers_do_not_go_back_is_found_out(
    pair: str, temperature: float, monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    """They must not stay behind the drafts whose masks they have given."""
    masked = Matchers.masked

    def stay(self: Matchers, groups: Sequence[RowGroup]) -> Any:
        found = masked(self, groups)
        for group in groups:
            for kept in self._kept.get(group.spec) or []:
                kept.inner.try_consume_tokens(list(group.draft))
        return found

    monkeypatch.setattr(Matchers, "masked", stay)
    with pytest.raises(AssertionError, match=r"an error|not valid|differs"):
        check_cells(few_cells(pair, temperature))
