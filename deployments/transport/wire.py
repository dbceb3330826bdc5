"""What travels on a link: frames of plain data, in one schema for every carrier. Nothing that arrives is executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from specdec.core.errors import SpecdecError
from specdec.core.messages import Message
from specdec.core.tokens import SharedTokens
from specdec.core.types import UNKNOWN, Fingerprints, LogprobsPart

Batch = tuple[Any, ...]
"""Messages that travel together; an empty batch is a heartbeat."""
FingerprintKind = Literal["decision", "vocabulary"]

WIRE_VERSION = 16
"""Version of frames and messages. Raise it with every change that a process of the version before would misread."""
MAX_FRAME_BYTES = 256 << 20
"""Longest frame that is sent or taken; Serve's own limit is the same (``cluster.config.environment``)."""
USUAL_FRAME_BYTES = 1 << 20
"""A batch that is longer is sent in several frames, so that no event loop copies much at once. Only what cannot be cut
makes a longer frame: one message, or the tokens of one prompt."""


class Hello(Struct, frozen=True, array_like=True, tag=True):
    """The caller's first frame.

    Attributes:
        caller: Replica id of the caller.
        callee: Replica id the caller means. Serve may send a call elsewhere after a death, so the callee compares.
        deployment: Name of the caller's deployment.
        fingerprints: What the caller's models are.
        wire: The caller's version of frames and messages; 0 of a caller that tells none.
        application: Name of the caller's application.
    """

    caller: str
    callee: str
    deployment: str
    fingerprints: Fingerprints = Fingerprints()
    wire: int = 0
    application: str = ""


class Greeting(Struct, frozen=True, array_like=True, tag=True):
    """The callee's first frame.

    Attributes:
        replica: Replica id of the callee.
        fingerprints: What the callee's models are.
        refusal: Why the callee will not open this link; empty if it does.
        wire: The callee's version of frames and messages; 0 of a callee that tells none.
    """

    replica: str
    fingerprints: Fingerprints = Fingerprints()
    refusal: str = ""
    wire: int = 0


class Messages(Struct, frozen=True, array_like=True, tag=True):
    """Every other frame: a batch."""

    batch: tuple[Message, ...] = ()


class _Packed(Struct, frozen=True, array_like=True, tag="Messages"):
    """``Messages`` as they travel: large immutable parts of a message are attached, and it holds their number.

    So all samples of a request that are opened in one batch carry their prompt once and share it where they arrive, and
    what is long goes ahead in frames of its own.

    Attributes:
        attached: Parts as bytes, numbered from the first frame of the batch on.
        messages: An encoded tuple of messages.
        continues: The next frame belongs to the same batch and may refer to what was attached so far.
    """

    attached: tuple[bytes, ...]
    messages: msgspec.Raw
    continues: bool = False


Frame = Hello | Greeting | Messages
F = TypeVar("F", Hello, Greeting, Messages)


Attachment = SharedTokens | LogprobsPart


class _Attaching:
    """What is attached to a batch that is being encoded."""

    def __init__(self) -> None:
        self.parts: list[Attachment] = []
        self._numbers: dict[int, int] = {}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._number)

    def encode(self, messages: Message | Batch) -> bytes:
        """Messages as bytes, with numbers in place of what is attached."""
        try:
            return self._encoder.encode(messages)
        except (TypeError, ValueError, OverflowError) as error:
            raise LinkError(f"a message cannot be encoded: {error}") from error

    def truncate(self, count: int) -> None:
        """Forget all parts but the first ``count``."""
        for part in self.parts[count:]:
            del self._numbers[id(part)]
        del self.parts[count:]

    def _number(self, part: object) -> int:
        if not isinstance(part, Attachment):
            raise TypeError(f"{type(part).__name__} is no part of a message")
        number = self._numbers.setdefault(id(part), len(self.parts))
        if number == len(self.parts):
            self.parts.append(part)
        return number


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Hello | Greeting | _Packed)


def encode(frame: Frame) -> bytes:
    """A frame as bytes.

    Raises:
        LinkError: It is longer than a frame may be, or holds what is not a message.
    """
    if isinstance(frame, Messages):
        attaching = _Attaching()
        messages = msgspec.Raw(attaching.encode(frame.batch))
        data = _ENCODER.encode(_Packed(tuple(part.to_bytes() for part in attaching.parts), messages))
    else:
        data = _ENCODER.encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise LinkError(f"a frame of {len(data)} bytes is too long; at most {MAX_FRAME_BYTES} are sent")
    return data


def frames(batch: Batch, on_unsendable: Callable[[Any, str], None]) -> Iterator[bytes]:
    """A batch as one frame, or several where it is long. They have to be sent on one link, one after the other.

    Args:
        batch: Messages.
        on_unsendable: Called with a message that is too long for any link, and with what is wrong; it is left out.

    Raises:
        LinkError: It holds what is not a message.
    """
    attaching = _Attaching()
    messages = attaching.encode(batch)
    attached = tuple(part.to_bytes() for part in attaching.parts)
    if len(messages) + sum(map(len, attached)) <= USUAL_FRAME_BYTES:
        yield _ENCODER.encode(_Packed(attached, msgspec.Raw(messages)))
        return
    frame = _OpenFrame()
    attaching.truncate(0)
    for message in batch:
        known = len(attaching.parts)
        data = attaching.encode(message)
        attached = tuple(part.to_bytes() for part in attaching.parts[known:])
        length = len(data) + sum(map(len, attached))
        if length > MAX_FRAME_BYTES:
            attaching.truncate(known)
            what = f"a message ({type(message).__name__}) of {length} bytes"
            on_unsendable(message, f"{what} is too long to be sent; the most is {MAX_FRAME_BYTES}")
            continue
        for part in attached:
            yield from frame.make_room(len(part))
            frame.attached.append(part)
        yield from frame.make_room(len(data))
        frame.messages.append(msgspec.Raw(data))
    yield frame.close(continues=False)


class _OpenFrame:
    """A frame that is being filled."""

    def __init__(self) -> None:
        self.attached: list[bytes] = []
        self.messages: list[msgspec.Raw] = []
        self._size = 0

    def make_room(self, size: int) -> Iterator[bytes]:
        """Close the frame if ``size`` more bytes would make it long."""
        if self._size and self._size + size > USUAL_FRAME_BYTES:
            yield self.close(continues=True)
        self._size += size

    def close(self, *, continues: bool) -> bytes:
        """The frame; an empty one is begun."""
        messages = msgspec.Raw(_ENCODER.encode(self.messages))
        data = _ENCODER.encode(_Packed(tuple(self.attached), messages, continues))
        self.attached, self.messages, self._size = [], [], 0
        return data


class FrameReader:
    """Reads the frames that one link brings, in their order."""

    def __init__(self) -> None:
        self._begin()

    def decode(self, data: bytes, expected: type[F]) -> F:
        """The frame that bytes are. Messages of a long batch come in several, some of which may have none.

        Raises:
            LinkError: They are no frame, or not of the kind that has to come now.
        """
        try:
            packed = _DECODER.decode(data)
            frame = self._unpacked(packed) if isinstance(packed, _Packed) else packed
        except (msgspec.DecodeError, ValueError) as error:
            raise LinkError(f"an undecodable frame of {len(data)} bytes: {error}") from error
        if not isinstance(frame, expected):
            raise LinkError(f"{type(frame).__name__} in place of {expected.__name__}")
        return frame

    def _begin(self) -> None:
        self._attached: list[bytes] = []
        self._parts: dict[int, Attachment] = {}

    def _unpacked(self, packed: _Packed) -> Messages:
        self._attached += packed.attached
        if self._attached:
            batch = msgspec.msgpack.Decoder(tuple[Message, ...], dec_hook=self._part).decode(packed.messages)
        else:
            batch = _PLAIN_BATCHES.decode(packed.messages)
        if not packed.continues:
            self._begin()
        return Messages(batch)

    def _part(self, kind: type[Attachment], number: object) -> Attachment:
        """The part with a number, the same object each time; the decoder's hook."""
        if not isinstance(number, int) or not 0 <= number < len(self._attached):
            raise ValueError(f"{len(self._attached)} parts are attached, and a message has number {number}")
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = kind.from_bytes(self._attached[number])
        if not isinstance(part, kind):
            raise ValueError(f"part {number} is a {type(part).__name__}, not a {kind.__name__}")
        return part


_PLAIN_BATCHES = msgspec.msgpack.Decoder(tuple[Message, ...], dec_hook=FrameReader()._part)


def decode(data: bytes, expected: type[F]) -> F:
    """A frame that is not one of several; see :meth:`FrameReader.decode`."""
    return FrameReader().decode(data, expected)


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
        peer_timeout_s: A link on which nothing comes for so long is lost: the peer hangs, or its host is gone. A peer
            that dies is seen at once, by the end of its carrier.
        first_backoff_s: Pause before a lost link is opened again; doubled with each failure.
        max_backoff_s: Longest such pause.
        unlisted_s: How long a replica must be missing from Serve's list before it counts as stopping. A replica that
            gets a new ``user_config`` is missing only briefly.
    """

    open_timeout_s: float = 5.0
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 5.0
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0
    unlisted_s: float = 3.0


class LinkError(SpecdecError):
    """A link ended, or could not be opened; the sender of a lost message does not learn of it."""


class LinkRefusedError(LinkError):
    """The callee will not open the link: it is another replica, or it drains."""


class OtherModelError(LinkRefusedError):
    """There is no link between two models, two versions of one (rule 14), or two wire versions."""


class HostFailedError(SpecdecError):
    """The machine of this replica has raised, or makes no progress; the replica has to be replaced."""
