"""Messages survive the wire."""

import pickle
from dataclasses import fields, is_dataclass
from typing import get_args

import pytest

from specdec.protocol import messages
from specdec.protocol.compact import Compact
from specdec.protocol.marks import Mark
from specdec.protocol.messages import Candidates, Inc, Message, Notes, Offer, Open, Outcome, Plan, Verdict
from specdec.sampling.params import SamplingParams, SequenceSpec

INC, MARK = Inc(2, 3), Mark(3, 77)
DRAWN = Candidates((4, 9), (0.25, 0.75))
SPEC = SequenceSpec(SamplingParams(temperature=0.5), 7, 3, 20)
EXAMPLES = [
    Offer("s", INC, MARK, (4,), ((Outcome(0, 9), (5, 6)),), (DRAWN,), ((DRAWN, DRAWN),)),
    Verdict("s", INC, 3, (4, 5), Notes("ac", (0, 1)), MARK, "stop"),
    Open("s", INC, "r", (1, 2, 3), SPEC, Plan(4, 16, 5, 0.7, "in_turn", 0.1), 5.0),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_is_the_same_after_the_wire(message: Message) -> None:
    (same,) = pickle.loads(pickle.dumps((message,), pickle.HIGHEST_PROTOCOL))
    assert same == message
    assert type(same) is type(message)


@pytest.mark.parametrize("kind", get_args(Message), ids=lambda kind: kind.__name__)
def test_every_message_is_compact(kind: type) -> None:
    assert issubclass(kind, Compact)
    assert is_dataclass(kind)
    assert len(fields(kind)) > 1  # one would be read without the tuple around it


def test_nothing_in_a_message_is_pickled_field_by_field_in_python() -> None:
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and is_dataclass(kind)]
    assert {kind for kind in kinds if not issubclass(kind, Compact)} <= {SequenceSpec}
