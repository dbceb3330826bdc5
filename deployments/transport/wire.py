"""What travels on a link: frames of plain data, in one schema for every carrier. Nothing that arrives is executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from specdec.errors import SpecdecError
from specdec.protocol.messages import Message
from specdec.tokens import SharedTokens
from specdec.types import UNKNOWN, Fingerprints

Batch = tuple[Any, ...]
"""Messages that travel together; an empty batch is a heartbeat."""
FingerprintKind = Literal["decision", "vocabulary"]

WIRE_VERSION = 1
"""Version of frames and messages. Raise it with every change that a process of the version before would misread."""
MAX_FRAME_BYTES = 256 << 20
"""Longest frame that is sent or taken; Serve's limit for its own messages is the same (``cluster.settings``)."""
USUAL_FRAME_BYTES = 4 << 20
"""A batch that is longer is sent in several frames, so that no event loop decodes much at once."""


class Hello(Struct, frozen=True, array_like=True, tag=True):
    """The caller's first frame.

    Attributes:
        caller: Replica id of the caller.
        callee: Replica id the caller means. Serve may send a call elsewhere after a death, so the callee compares.
        deployment: Name of the caller's deployment.
        fingerprints: What the caller's models are.
        wire: The caller's version of frames and messages.
    """

    caller: str
    callee: str
    deployment: str
    fingerprints: Fingerprints = Fingerprints()
    wire: int = WIRE_VERSION


class Greeting(Struct, frozen=True, array_like=True, tag=True):
    """The callee's first frame.

    Attributes:
        replica: Replica id of the callee.
        fingerprints: What the callee's models are.
        refusal: Why the callee will not open this link; empty if it does.
        wire: The callee's version of frames and messages.
    """

    replica: str
    fingerprints: Fingerprints = Fingerprints()
    refusal: str = ""
    wire: int = WIRE_VERSION


class Messages(Struct, frozen=True, array_like=True, tag=True):
    """Every other frame: a batch."""

    batch: tuple[Message, ...] = ()


class _Packed(Struct, frozen=True, array_like=True, tag="Messages"):
    """``Messages`` as they travel: where a message has shared tokens, ``batch`` has their place in ``prompts``.

    So all samples of a request that are opened in one batch carry their prompt once, and share it where they arrive.

    Attributes:
        prompts: Little-endian int32.
        batch: An encoded tuple of messages.
    """

    prompts: tuple[bytes, ...]
    batch: msgspec.Raw


Frame = Hello | Greeting | Messages
F = TypeVar("F", Hello, Greeting, Messages)


class _Prompts:
    """The shared tokens of a frame."""

    def __init__(self, known: tuple[bytes, ...] = ()) -> None:
        self.known = [SharedTokens.from_bytes(data) for data in known]
        self._places: dict[int, int] = {}

    def place(self, value: object) -> int:
        """Where a message's tokens stand, by their identity; the encoder's hook."""
        if not isinstance(value, SharedTokens):
            raise TypeError(f"{type(value).__name__} is no part of a message")
        place = self._places.setdefault(id(value), len(self.known))
        if place == len(self.known):
            self.known.append(value)
        return place

    def at(self, _kind: type, place: object) -> SharedTokens:
        """The tokens at a place; the decoder's hook."""
        if not isinstance(place, int) or not 0 <= place < len(self.known):
            raise ValueError(f"there are {len(self.known)} prompts, and a message has number {place}")
        return self.known[place]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Hello | Greeting | _Packed)
_PLAIN_BATCHES = msgspec.msgpack.Decoder(tuple[Message, ...], dec_hook=_Prompts().at)


def encode(frame: Frame) -> bytes:
    """A frame as bytes.

    Raises:
        LinkError: It is longer than a frame may be, or holds what is not a message.
    """
    data = _encoded(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise LinkError(f"a frame of {len(data)} bytes is too long; at most {MAX_FRAME_BYTES} are sent")
    return data


def _encoded(frame: Frame) -> bytes:
    try:
        if isinstance(frame, Messages):
            prompts = _Prompts()
            batch = msgspec.msgpack.Encoder(enc_hook=prompts.place).encode(frame.batch)
            packed = tuple(shared.tokens.tobytes() for shared in prompts.known)
            return _ENCODER.encode(_Packed(packed, msgspec.Raw(batch)))
        return _ENCODER.encode(frame)
    except (TypeError, ValueError, OverflowError) as error:
        raise LinkError(f"a message cannot be encoded: {error}") from error


def frames(batch: Batch, on_unsendable: Callable[[Any, str], None]) -> Iterator[bytes]:
    """A batch as one frame, or several where it is long.

    Args:
        batch: Messages.
        on_unsendable: Told of a message that is too long for a frame of its own, with what is wrong; it is left out.

    Raises:
        LinkError: It holds what is not a message.
    """
    data = _encoded(Messages(batch))
    if len(batch) > 1 and len(data) > USUAL_FRAME_BYTES:
        half = len(batch) // 2
        yield from frames(batch[:half], on_unsendable)
        yield from frames(batch[half:], on_unsendable)
    elif len(data) > MAX_FRAME_BYTES:
        what = f"a message ({type(batch[0]).__name__}) of {len(data)} bytes"
        on_unsendable(batch[0], f"{what} is too long to be sent; the most is {MAX_FRAME_BYTES}")
    else:
        yield data


def decode(data: bytes, expected: type[F]) -> F:
    """The frame that bytes are.

    Raises:
        LinkError: They are no frame, or not of the kind that has to come now.
    """
    try:
        packed = _DECODER.decode(data)
        frame = _unpacked(packed) if isinstance(packed, _Packed) else packed
    except (msgspec.DecodeError, ValueError) as error:
        raise LinkError(f"an undecodable frame of {len(data)} bytes: {error}") from error
    if not isinstance(frame, expected):
        raise LinkError(f"{type(frame).__name__} in place of {expected.__name__}")
    return frame


def _unpacked(packed: _Packed) -> Messages:
    if not packed.prompts:
        return Messages(_PLAIN_BATCHES.decode(packed.batch))
    decoder = msgspec.msgpack.Decoder(tuple[Message, ...], dec_hook=_Prompts(packed.prompts).at)
    return Messages(decoder.decode(packed.batch))


def mismatch(mine: Fingerprints, theirs: Fingerprints, kind: FingerprintKind, wire: int = WIRE_VERSION) -> str:
    """Why two replicas must not work together (rule 14); empty if they may. An empty fingerprint matches any.

    Args:
        mine: What this replica's models are.
        theirs: What the peer's are.
        kind: Which of them must be equal.
        wire: The peer's version of frames and messages.
    """
    if wire != WIRE_VERSION:
        return f"its wire version is {wire}, here it is {WIRE_VERSION}: another version of the service"
    here, there = getattr(mine, kind), getattr(theirs, kind)
    if not here or not there or here == there:
        return ""
    return f"its {kind} fingerprint is {there}, here it is {here}: another model, or another version of it"


@dataclass(frozen=True, slots=True)
class Identity:
    """Where a replica runs, and what it can work with.

    Attributes:
        deployment: Name of its deployment.
        replica: Serve's id of it.
        pid: Of its process.
        node: Ray's id of its node.
        fingerprints: What its models are.
        is_serving: Whether it takes new sequences: it does not drain, and has the peers that it needs for that.
        wire: Its version of frames and messages.
    """

    deployment: str
    replica: str
    pid: int
    node: str
    fingerprints: Fingerprints = UNKNOWN
    is_serving: bool = True
    wire: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """How patient the ends of a link are.

    Attributes:
        open_timeout_s: Longest wait for the other end's first frame.
        heartbeat_s: An idle link carries an empty batch this often, each way.
        silence_s: A link on which nothing comes for so long is lost: the peer hangs, or its host is gone. A peer that
            dies is seen at once, by the end of its carrier.
        first_backoff_s: Pause before a lost link is opened again; doubled with each failure.
        max_backoff_s: Longest such pause.
    """

    open_timeout_s: float = 5.0
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class LinkError(SpecdecError):
    """A link ended, or could not be opened; the sender of a lost message is not told."""


class LinkRefusedError(LinkError):
    """The callee will not open the link: it is another replica, or it drains."""


class OtherModelError(LinkRefusedError):
    """There is no link between two models, two versions of one (rule 14), or two wire versions."""


class HostFailedError(SpecdecError):
    """The machine of this replica has raised, or makes no progress; the replica has to be replaced."""
