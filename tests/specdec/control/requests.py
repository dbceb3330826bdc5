"""A controller with requests that end and come again, and a drafter that may be lost; fed by hand."""

from __future__ import annotations

from specdec.control.estimates import Round
from tests.specdec.control.test_controller import DRAFT_S, STEP_S, Service, kept, spec, steps

REVIEW_S = 0.25


class Requests(Service):
    """A service whose requests end and come again, with a drafter that may be lost."""

    def __init__(self, *args, **others):
        super().__init__(*args, **others)
        self.num_opened = 0

    @property
    def group(self):
        return self.controller._groups["T"]

    @property
    def lengths(self):
        return [self.plans[seq].num_draft_tokens for seq in self.seqs]

    def end(self):
        for seq in self.seqs:
            self.controller.closed(seq)
        self.seqs, self.plans = [], {}

    def begin(self, bounds):
        for bound in bounds:
            self.num_opened += 1
            seq = f"r{self.num_opened}"
            self.seqs.append(seq)
            self.plans[seq] = self.controller.opened(seq, spec(bound))

    def idle(self, seconds):
        """No request is there; reviews take place all the same."""
        end = self.now + seconds
        while self.now < end:
            self.now += REVIEW_S
            assert self.controller.review({}, self.now) == {}

    def draft_report(self, rows):
        sizes = ((rows * n, rows * n, DRAFT_S) for n in (1, 2, 3, 5, 9, 17, 33))
        return {**steps(sizes), "num_sequences": float(rows)}

    def run_alone(self, seconds, step_s=STEP_S):
        """No drafter can be had."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(8):
                self.now += step_s
                for seq in self.seqs:
                    self.controller.judged(seq, [Round(0, 0)], self.now)
            self.plans.update(self.controller.review(dict.fromkeys(self.seqs, ("T", None)), self.now))


def on_trial():
    """A service in the middle of a trial."""
    service = Requests((None,) * 4)
    while not (service.group._on_trial if service.controller._groups else False):
        service.run(kept(0.6), 0.2)
        assert service.now < 60
    return service
