"""What travels: every message as data, and nothing but messages."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deployments.transport import wire
from deployments.transport.wire import (
    WIRE_VERSION,
    FrameReader,
    Greeting,
    Hello,
    LinkError,
    Messages,
    decode,
    encode,
    mismatch,
)
from specdec.core import messages as m
from specdec.core.log import PrefixHash
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import NO_TOKENS, SharedTokens
from specdec.core.types import Fingerprints, PackedLogprobs, TokenLogprobs
from tests.letters import provenance

EPOCH, PREFIX_HASH = m.Epoch(1, 2), PrefixHash(7, (1 << 61) - 2)
ALLOWED = SharedTokens((5, 6))
SPEC = SequenceSpec(
    SamplingParams(logit_bias=((3, -1.5),), allowed_token_ids=ALLOWED, stop_token_ids=(4,), logprobs=2, temperature=1),
    seed=(1 << 64) - 1,
    output_start=3,
    max_tokens=9,
    eos_token_ids=(2,),
    arrival_s=1.5,
    priority=-2,
    num_speculative_tokens=0,
    wants_times=True,
    keeps_numeric=False,
    owner=b"\x00owner\xff\x01",
)
PROMPT = SharedTokens((1, 2, 3))
TIMES = None, m.RoundTimes((1.5, 2.5), ((0.5, 1.0), (1.0, 1.25)))
LOGPROBS = TokenLogprobs(-0.5, 1, ((1, -0.5),)), TokenLogprobs(float("-inf"), 9)
NOTES = m.Notes(provenance("ac"), (0, 3), LOGPROBS, PackedLogprobs.pack((None, *LOGPROBS)), 2, TIMES)
BRANCHES = ((m.Outcome(0, 5), (6, 7)),)
ALL = (
    m.Submit("s", 1, "i", PROMPT, SPEC, "d", (7,)),
    m.Want("s", 1, "i", 3),
    m.Cancel("s", 1),
    m.NewTokens("s", 1, 3, (4, 5), NOTES, PREFIX_HASH, m.Plan(3, mode="sequential")),
    m.End("s", 1, PREFIX_HASH, "error", "why"),
    m.Gone("s", 1, "draining"),
    m.Open("s", EPOCH, "r", PROMPT, SPEC, m.Plan(), 5.0, "f", "suspects", (7,)),
    m.Verdict("s", EPOCH, 3, (4, 5), NOTES, PREFIX_HASH, "length"),
    m.Ack("s", EPOCH, 5),
    m.Commit("s", EPOCH, 3, (4, 5), PREFIX_HASH),
    m.Offer("s", EPOCH, PREFIX_HASH, (4,), BRANCHES, ((0.5, 1.0),)),
    m.PlanUpdate("s", EPOCH, m.Plan(draft_wait_s=0.5)),
    m.Close("s", EPOCH),
    m.Live("r", (("s", EPOCH),)),
    m.Resync("w", "s", EPOCH, 3, "evicted"),
    m.Alive("w", {"num_steps": 3.0}, "contract"),
)


def test_every_message_arrives_as_it_was() -> None:
    assert {type(message) for message in ALL} == set(m.Message.__args__), "a message is missing here"
    assert decode(encode(Messages(ALL)), Messages).batch == ALL


GOLDEN = Path(__file__).with_name("golden.json")
"""By wire version, and by the frame's or message's type, what it is on the wire, in hexadecimal."""
FRAMES = (
    Hello("w", "r", "Target", Fingerprints("d", "v"), WIRE_VERSION, "mine"),
    Greeting("r", Fingerprints("d", "v"), "no", WIRE_VERSION),
    *(Messages((message,)) for message in ALL),
)


def test_the_bytes_of_a_version_never_change() -> None:
    """Where they must, raise WIRE_VERSION and add what this test prints to the file."""
    golden = json.loads(GOLDEN.read_text())
    written = {type(frame.batch[0] if isinstance(frame, Messages) else frame).__name__: frame for frame in FRAMES}
    now = {name: encode(frame).hex() for name, frame in written.items()}
    assert golden.get(str(WIRE_VERSION)) == now, json.dumps({WIRE_VERSION: now})
    for name, frame in written.items():
        assert decode(bytes.fromhex(now[name]), type(frame)) == frame


def test_samples_of_a_request_carry_its_allowed_tokens_once() -> None:
    allowed = SharedTokens(range(100_000))
    spec = replace(SPEC, sampling=SamplingParams(allowed_token_ids=allowed))
    samples = tuple(m.Submit(f"s{i}", 0, "i", PROMPT, replace(spec, seed=i)) for i in range(128))
    data = encode(Messages(samples))
    assert len(data) < 4 * len(allowed) + 128 * 600
    arrived = decode(data, Messages).batch
    assert arrived == samples
    assert len({id(sample.spec.sampling.allowed_token_ids) for sample in arrived}) == 1


def test_types_of_tuples_survive() -> None:
    [verdict] = decode(encode(Messages((ALL[7],))), Messages).batch
    assert isinstance(verdict.epoch, m.Epoch)
    assert isinstance(verdict.prefix_hash, PrefixHash)


def test_greetings_travel_in_the_same_schema() -> None:
    prints = Fingerprints("d", "v")
    for frame in (Hello("w", "r", "Target", prints), Greeting("r", prints, "no"), Messages()):
        assert decode(encode(frame), type(frame)) == frame


def test_who_tells_no_wire_version_has_another() -> None:
    for frame in (["Hello", "w", "r", "Target"], ["Greeting", "r"]):
        hello = decode(msgspec.msgpack.encode(frame), Hello if frame[0] == "Hello" else Greeting)
        assert mismatch(Fingerprints(), hello.fingerprints, "decision", hello.wire)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1",
        pickle.dumps(Greeting("r")),
        msgspec.msgpack.encode(["Messages", [], [["Unknown", 1]]]),
        msgspec.msgpack.encode(["Messages", [], [["Cancel", "s", "one"]]]),
        encode(Messages(ALL))[:-1],
        encode(Messages(ALL)) + b"\x00",
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(LinkError, match="undecodable frame"):
        decode(data, Messages)


def test_a_frame_that_must_not_come_now_is_refused() -> None:
    with pytest.raises(LinkError, match="Messages in place of Greeting"):
        decode(encode(Messages()), Greeting)


def test_what_cannot_be_encoded_or_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LinkError, match="cannot be encoded"):
        encode(Messages((object(),)))
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(LinkError, match="too long"):
        encode(Messages((m.Cancel("x" * 100, 0),)))


def test_fingerprints_match_by_kind_and_empty_ones_match_any() -> None:
    mine = Fingerprints("d", "v")
    assert not mismatch(mine, Fingerprints("d", "w"), "decision")
    assert not mismatch(mine, Fingerprints("", "v"), "decision")
    assert not mismatch(Fingerprints(), Fingerprints("e", "w"), "decision")
    assert "vocabulary fingerprint is w, here it is v" in mismatch(mine, Fingerprints("d", "w"), "vocabulary")


def test_a_prompt_and_a_prediction_travel_once_a_frame_and_are_shared_where_they_arrive() -> None:
    prompt, other, prediction = (SharedTokens(range(10_000)) for _ in range(3))
    spec = replace(SPEC, prediction=prediction)
    batch = (
        *(m.Submit(str(i), 1, "i", prompt, spec) for i in range(128)),
        m.Cancel("s", 1),
        m.Open("o", EPOCH, "r", other, SPEC, m.Plan(), 5.0),
    )
    data = encode(Messages(batch))
    found = decode(data, Messages).batch
    assert found == batch
    assert len({id(message.prompt) for message in found[:128]}) == 1, "the samples share no prompt"
    assert len({id(message.spec.prediction) for message in found[:128]}) == 1, "the samples share no prediction"
    assert len(data) < 3 * prompt.tokens.nbytes + 130 * len(encode(Messages(batch[-1:]))[: -other.tokens.nbytes])


@pytest.mark.parametrize("place", [1, -1, "x", None, b"\0\0\0\0"])
def test_a_message_whose_prompt_is_not_in_its_frame_is_refused(place: object) -> None:
    submit = msgspec.to_builtins(m.Submit("s", 1, "i", PROMPT, SPEC), enc_hook=lambda _: place)
    for prompts in ([], [PROMPT.tokens.tobytes()]):
        with pytest.raises(LinkError, match="undecodable frame"):
            decode(msgspec.msgpack.encode(["Messages", prompts, [submit]]), Messages)


def test_an_attachment_that_two_messages_take_for_different_things_is_refused() -> None:
    batch = [msgspec.to_builtins(message, enc_hook=lambda _: 0, builtin_types=(bytes,)) for message in (ALL[0], ALL[3])]
    with pytest.raises(LinkError, match="part 0 is a SharedTokens, not a LogprobsPart"):
        decode(msgspec.msgpack.encode(["Messages", [b"\0\0\0\0"], batch]), Messages)


def received(parts: list[bytes]) -> tuple[m.Message, ...]:
    reader = FrameReader()
    return tuple(message for part in parts for message in reader.decode(part, Messages).batch)


def test_long_parts_of_messages_travel_once_in_short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = SharedTokens(range(150_000))
    logprobs = PackedLogprobs.pack((None, *[TokenLogprobs(-1.0, 1, tuple((i, -0.1 * i) for i in range(20)))] * 10_000))
    verdict = m.Verdict("s", EPOCH, 3, (4,), m.Notes(provenance("p"), (0,), None, logprobs), PREFIX_HASH)
    submits = [m.Submit(str(i), 1, "i", prompt, SPEC) for i in range(20)]
    submits.append(m.Submit("other", 1, "i", PROMPT, SPEC))
    batch = (submits[0], verdict, *submits[1:])
    parts = list(wire.frames(batch, pytest.fail))
    found = received(parts)
    assert found == batch
    assert len({id(message.prompt) for message in found if isinstance(message, m.Submit)}) == 2
    assert max(map(len, parts)) <= wire.USUAL_FRAME_BYTES + 100
    attached = prompt.tokens.nbytes + sum(len(part.data) for part in logprobs.parts)
    assert attached < sum(map(len, parts)) < attached + 20_000
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 700_000)
    refused: list[object] = []
    parts = list(wire.frames(batch, lambda message, _reason: refused.append(message)))
    assert refused == [verdict]
    assert received(parts) == tuple(submits)


def test_attachments_are_forgotten_with_the_last_frame_of_their_batch() -> None:
    submit = msgspec.to_builtins(ALL[0], enc_hook=[PROMPT, ALLOWED, NO_TOKENS].index, builtin_types=(bytes,))
    attached = [tokens.to_bytes() for tokens in (PROMPT, ALLOWED, NO_TOKENS)]
    frames = [["Messages", attached, [], True], ["Messages", [], [submit]], ["Messages", [], [submit]]]
    first, second, third = map(msgspec.msgpack.encode, frames)
    reader = FrameReader()
    assert [reader.decode(part, Messages).batch for part in (first, second)] == [(), ALL[:1]]
    with pytest.raises(LinkError, match="0 parts are attached"):
        reader.decode(third, Messages)


def test_a_long_batch_travels_in_several_frames_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "USUAL_FRAME_BYTES", 600)
    batch = tuple(m.Cancel(f"{i:040}", i) for i in range(50))
    parts = list(wire.frames(batch, pytest.fail))
    assert 4 < len(parts) < 10
    assert all(len(part) <= 620 for part in parts)
    assert received(parts) == batch
    assert len(list(wire.frames((), pytest.fail))) == 1, "a heartbeat"


def test_a_message_that_is_too_long_is_left_out_and_told_of_and_all_others_travel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "USUAL_FRAME_BYTES", 100)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 200)
    batch = (m.Cancel("a", 1), m.Cancel("x" * 300, 1), m.Cancel("y" * 150, 1), m.Cancel("b", 1))
    refused: list[tuple[object, str]] = []
    parts = list(wire.frames(batch, lambda message, reason: refused.append((message, reason))))
    assert received(parts) == (batch[0], *batch[2:])
    ((message, reason),) = refused
    assert message is batch[1]
    assert reason.startswith("a message (Cancel) of 3")
    assert reason.endswith("bytes is too long to be sent; the most is 200")
