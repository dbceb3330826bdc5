"""Recordings: what a service or an engine said, one sample a line of JSON, with all that decided its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specdec.core.errors import InvalidParameterError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens, are_ids
from specdec.core.types import Adapter, Finish, Tokens

if TYPE_CHECKING:
    from specdec.engine.results import GenerationResult


@dataclass(frozen=True, slots=True)
class Sample:
    """One recorded answer. The names of its fields are those of the line's object.

    Attributes:
        prompt_token_ids: At least one.
        output_token_ids: The answer, its ending token included.
        max_tokens: Most output tokens, at least 1.
        sampling: How tokens were chosen, with the model's defaults filled in.
        seed: Of the sequence's noise, as used, in [0, 2**64); None if it is unknown.
        eos_token_ids: The model's end-of-sequence ids.
        finish_reason: How the answer ended.
        adapter: What the target was used with.
        draft_adapter: The same of the draft.
        prediction_token_ids: What the client expected the output to be like.
        owner: Whose request it was; empty if nobody says.
        system_fingerprint: Of what decided the tokens; empty if unknown.
    """

    prompt_token_ids: Tokens
    output_token_ids: Tokens
    max_tokens: int
    sampling: SamplingParams
    seed: int | None = None
    eos_token_ids: Tokens = ()
    finish_reason: Finish = "length"
    adapter: Adapter | None = None
    draft_adapter: Adapter | None = None
    prediction_token_ids: Tokens = ()
    owner: str = ""
    system_fingerprint: str = ""

    @classmethod
    def of(cls, result: GenerationResult, owner: str = "", system_fingerprint: str = "") -> Sample:
        """Record what an engine generated."""
        tokens = result.prompt_token_ids, result.token_ids
        return cls.of_sequence(result.spec, *tokens, result.finish_reason, owner, system_fingerprint)

    @classmethod
    def of_sequence(
        cls,
        spec: SequenceSpec,
        prompt_token_ids: Tokens,
        output_token_ids: Tokens,
        finish_reason: Finish,
        owner: str = "",
        system_fingerprint: str = "",
    ) -> Sample:
        """Record a sequence and its output."""
        return cls(
            prompt_token_ids,
            output_token_ids,
            spec.max_tokens,
            replace(spec.sampling, logprobs=None, prompt_logprobs=None),
            spec.seed,
            spec.eos_token_ids,
            finish_reason,
            spec.adapter,
            spec.draft_adapter,
            tuple(spec.prediction),
            owner,
            system_fingerprint,
        )

    def spec(self, seed: int = 0) -> SequenceSpec:
        """Return the sequence's parameters; ``seed`` counts only if the sample has none."""
        return SequenceSpec(
            self.sampling,
            seed if self.seed is None else self.seed,
            len(self.prompt_token_ids),
            self.max_tokens,
            self.eos_token_ids,
            prediction=SharedTokens(self.prediction_token_ids),
            adapter=self.adapter,
            draft_adapter=self.draft_adapter,
        )

    def check(self) -> None:
        """Check what types do not say.

        Raises:
            ValueError: A field is not allowed; the message names it.
        """
        for name in ("prompt_token_ids", "output_token_ids", "eos_token_ids", "prediction_token_ids"):
            if not are_ids(getattr(self, name)):
                raise ValueError(f"{name} must be token ids, integers from 0 to 2**31 - 1")
        if not self.prompt_token_ids:
            raise ValueError("prompt_token_ids must have at least one token")
        if self.max_tokens < max(1, len(self.output_token_ids)):
            raise ValueError(f"max_tokens is {self.max_tokens}, and must be at least 1 and the length of the output")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed}, and must be from 0 to 2**64 - 1")


_FIELDS = frozenset(one.name for one in fields(Sample))
_SAMPLING_FIELDS = frozenset(one.name for one in fields(SamplingParams))


def write_recording(path: Path, samples: Iterable[Sample]) -> None:
    """Write a recording, in place of what the file has."""
    with path.open("wb") as file:
        for sample in samples:
            file.write(line_of(sample) + b"\n")


def line_of(sample: Sample) -> bytes:
    """Return a sample as a line of JSON, without the line's end."""
    return msgspec.json.encode(sample, enc_hook=list)


def object_of(sample: Sample) -> dict[str, Any]:
    """Return a sample as the object that its line holds."""
    found: dict[str, Any] = msgspec.to_builtins(sample, enc_hook=list)
    return found


def read_recording(path: Path) -> Iterator[Sample]:
    """Read a recording line by line; empty lines are skipped.

    Args:
        path: A file, or a folder whose ``*.jsonl`` files are read by name.

    Raises:
        InvalidParameterError: A line is no sample; the message names file, line and field.
        OSError: A file cannot be read.
    """
    for place, line in placed_lines(path):
        try:
            yield sample_of(line)
        except ValueError as error:
            raise InvalidParameterError("file", f"{place}: {error}") from None


def placed_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, or of a folder's ``*.jsonl`` files, with the place of each for error messages.

    A last line without an end that is no JSON is left out: somebody is writing it, or was stopped while he did.
    """
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        for number, line in numbered_lines(file):
            if line.endswith(b"\n") or _is_json(line):
                yield f"{file}, line {number}", line


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, with their numbers from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except ValueError:
        return False
    return True


def sample_of(line: bytes) -> Sample:
    """Parse a line.

    Raises:
        ValueError: It is no sample; the message names the field.
    """
    found = msgspec.json.decode(line)
    if not isinstance(found, dict):
        raise ValueError(f"a sample is an object, not {type(found).__name__}")
    _refuse_unknown(found, _FIELDS, "")
    if isinstance(found.get("sampling"), dict):
        _refuse_unknown(found["sampling"], _SAMPLING_FIELDS, "sampling.")
    sample = msgspec.convert(found, Sample, dec_hook=_decoded)
    sample.check()
    return sample


def _refuse_unknown(found: dict[str, Any], allowed: frozenset[str], prefix: str) -> None:
    if unknown := sorted(found.keys() - allowed):
        raise ValueError(f"unknown field {prefix}{unknown[0]}: a sample has {', '.join(sorted(allowed))}")


def _decoded(kind: type, value: Any) -> Any:
    if kind is SharedTokens and isinstance(value, list) and all(type(one) is int for one in value):
        return SharedTokens(value)
    raise ValueError(f"expected a list of token ids, got {value!r}")
