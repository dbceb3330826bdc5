"""Break one line at a time, and see whether the test named beside it fails: ``make mutants``, or ``ARGS="S1 D2"``.

A test may be deleted if no mutant survives without it. The protocol's rules are switched off by patches instead
(``tests/specdec/protocol/*mutations.py``); ``ARGS="rules"`` runs them all, and ``ARGS="credit"`` one.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).parents[1]
RULES = "tests/thorough/protocol/test_mutations.py"
RULE = "test_schedules_catch_a_rule_that_is_off"
TIMEOUT_S = 300

Verdict = Literal["caught", "survived", "failed to run"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault of one line.

    Attributes:
        name: What the command calls it.
        fault: What users or developers would see.
        file: Relative to the root of the repository.
        old: Text that stands exactly once in the file.
        new: What replaces it.
        finder: Tests of which at least one fails with it.
        reason: Why it may survive. Empty: it must be caught.
    """

    name: str
    fault: str
    file: str
    old: str
    new: str
    finder: tuple[str, ...]
    reason: str = ""


_PROTOCOL = "specdec/protocol/"
_SCHEDULES = ("tests/specdec/protocol/test_random_schedules.py::test_random_schedules",)
_BLOCKS = "specdec/cache/blocks.py"
_SCHEDULER = "specdec/engine/scheduler.py"
_LENGTH = "specdec/drafting/length.py"
_CONTROLLER = "specdec/drafting/controller.py"
_ADMISSION = "deployments/http/admission.py"


def _test(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{file}::{name}" for name in names)


MUTANTS = (
    Mutant(
        "P3",
        "a draft is a token longer than what may still be committed",
        _PROTOCOL + "target.py",
        "sequence.ending.most_length - len(sequence.log)) - 1",
        "sequence.ending.most_length - len(sequence.log))",
        _SCHEDULES,
    ),
    Mutant(
        "P5",
        "a sequence waits for an offer without end",
        _PROTOCOL + "target.py",
        "sequence.is_patient = sequence.is_patient and now_s < sequence.held_s + sequence.plan.draft_wait_s",
        "sequence.is_patient = sequence.is_patient",
        _SCHEDULES,
    ),
    Mutant(
        "P6",
        "a drafter prepares branches after a token that ends the text",
        _PROTOCOL + "draft_sequence.py",
        "if (position, token) in self.branches or token in self.ending_token_ids:",
        "if (position, token) in self.branches:",
        ("tests/specdec/protocol/test_branches.py",),
    ),
    Mutant(
        "P7",
        "a sequence goes where its prefix is cached however loaded that worker is",
        _PROTOCOL + "dispatcher.py",
        "able = [name for name, load in loads.items() if load <= most]\n    worth",
        "able = list(loads)\n    worth",
        _test("specdec/protocol/test_affinity.py", "test_the_choice"),
    ),
    Mutant(
        "P8",
        "a closed sequence leaves no tombstone if that of a newer epoch has just run out",
        _PROTOCOL + "leases.py",
        "if buried is None or buried[1] < now_s or epoch >= buried[0]:",
        "if buried is None or epoch >= buried[0]:",
        _test(
            "specdec/protocol/test_leases.py",
            "test_a_sequence_is_buried_if_the_tombstone_of_a_newer_epoch_has_run_out",
        ),
    ),
    Mutant(
        "P9",
        "a router keeps the notes of tokens that the client already has",
        _PROTOCOL + "router.py",
        "                session.notes = session.notes.last(len(session.log) - message.have)\n",
        "",
        _test(
            "specdec/protocol/test_router.py",
            "test_what_tells_of_a_prompt_is_sent_to_the_ingress_once_and_again_only_much_later",
        ),
    ),
    Mutant(
        "P10",
        "a new plan leaves a sequence open on a drafter that it no longer needs",
        _PROTOCOL + "router.py",
        "            self._dispatcher.close(session, session.drafter)\n        for link in session.links:",
        "            pass\n        for link in session.links:",
        _test(
            "specdec/protocol/test_replans.py",
            "test_a_plan_that_falls_to_nothing_leaves_the_drafter_and_one_that_rises_comes_back_under_a_new_n",
        ),
    ),
    Mutant(
        "P11",
        "a sequence goes on before the log probabilities of its prompt are acknowledged",
        _PROTOCOL + "target.py",
        "return sequence.finish is None and not is_telling and self._credit(sequence) > 0",
        "return sequence.finish is None and self._credit(sequence) > 0",
        _test(
            "specdec/protocol/test_target.py",
            "test_what_tells_of_a_prompt_is_sent_once_until_it_is_acknowledged_and_nothing_follows_it",
        ),
    ),
    Mutant(
        "P12",
        "a strict sequence is handed over to a target with other bits",
        _PROTOCOL + "dispatcher.py",
        "if not numeric or self.workers.with_bits(numeric):",
        "if True:",
        _test(
            "specdec/protocol/test_numeric.py",
            "test_a_draining_target_finishes_a_strict_sequence_if_no_other_is_known_to_have_its_bits",
        ),
    ),
    Mutant(
        "A1",
        "a token of a tree is kept though the token before it was refused",
        "specdec/sampling/acceptance.py",
        "if parent == at and draft[node] == chosen[at + 1]:",
        "if draft[node] == chosen[at + 1]:",
        _test("specdec/sampling/test_coupled.py", "test_the_run_is_plain_decodings_whatever_the_draft"),
    ),
    Mutant(
        "A3",
        "above and below temperature 1 branches are ranked by likelihoods that are too sharp or too flat",
        "specdec/sampling/acceptance.py",
        "group.spec.sampling.temperature or 1.0 for group",
        "1.0 for group",
        _test("specdec/sampling/test_coupled.py", "test_a_lead_is_worth_as_much_in_logits_at_every_temperature"),
    ),
    Mutant(
        "B1",
        "what a published block is kept for is not forgotten when its owner writes into it",
        _BLOCKS,
        "            self._forget(table[tail])\n",
        "",
        ("tests/specdec/cache/test_blocks.py",),
    ),
    Mutant(
        "B2",
        "a block is not cleared of its earlier owner's state",
        _BLOCKS,
        "        if self._was_used[block]:\n            self._uncleared.add(block)\n",
        "",
        ("tests/specdec/cache/test_blocks.py",),
    ),
    Mutant(
        "B3",
        "a prefix is evicted before the blocks that continue it",
        _BLOCKS,
        "for block in reversed(table[num_blocks:]):",
        "for block in table[num_blocks:]:",
        ("tests/specdec/cache/test_blocks.py",),
    ),
    Mutant(
        "B4",
        "a sequence that is cut writes into a published block",
        _BLOCKS,
        "room = length if length < len(sequence.block_digests) * size else num_blocks * size",
        "room = num_blocks * size",
        ("tests/specdec/cache/test_blocks.py",),
    ),
    Mutant(
        "B5",
        "the device keeps a table of blocks from before a copy",
        _BLOCKS,
        "                sequence.num_sent = min(sequence.num_sent, past // self.block_size)\n",
        "                pass\n",
        ("tests/specdec/models/test_runner.py",),
    ),
    Mutant(
        "B6",
        "a sliding window drops blocks that draft tokens still read",
        _BLOCKS,
        "max(0, len(sequence.tokens) - self._lookahead)",
        "max(0, len(sequence.tokens))",
        ("tests/specdec/cache/test_blocks.py",),
    ),
    Mutant(
        "B7",
        "the copy of a shared last block is not counted as needed room",
        _BLOCKS,
        "if num_missing + copies_tail > group.num_free",
        "if num_missing > group.num_free",
        ("tests/specdec/cache/test_blocks.py",),
    ),
    Mutant(
        "S1",
        "prompts that arrive together each compute the prefix that they share",
        _SCHEDULER,
        "if (n := request.num_computed_tokens) and not self._decodes[index]",
        "if (n := request.num_computed_tokens) and False",
        ("tests/specdec/engine/test_scheduler.py",),
    ),
    Mutant(
        "S2",
        "the first draft always gets the token that does not divide evenly",
        _SCHEDULER,
        "given[larger[(number + turn) % len(larger)]] += 1",
        "given[larger[number % len(larger)]] += 1",
        ("tests/specdec/engine/test_budget.py", "tests/specdec/engine/test_scheduler.py"),
    ),
    Mutant(
        "S3",
        "after memory ran out the steps grow each time until it runs out again",
        _SCHEDULER,
        "self.max_num_batched_tokens)\n            self._num_steps_at_budget = 0\n",
        "self.max_num_batched_tokens)\n",
        _test(
            "specdec/engine/test_scheduler.py",
            "test_a_step_that_ran_out_of_memory_is_cut_by_a_quarter_and_grows_slowly",
        ),
    ),
    Mutant(
        "S4",
        "nothing decodes in a step that has less than a token for each sequence",
        _SCHEDULER,
        "count = max(left - self._num_to_decode, min(1, left))",
        "count = max(left - self._num_to_decode, 0)",
        ("tests/specdec/engine/test_budget.py", "tests/specdec/engine/test_scheduler.py"),
    ),
    Mutant(
        "S5",
        "a draft that does not fit is dropped instead of shortened",
        _SCHEDULER,
        "                count -= 1\n",
        "                count = 0\n",
        ("tests/specdec/engine/test_room.py", "tests/specdec/engine/test_scheduler.py"),
    ),
    Mutant(
        "S6",
        "a long prompt takes the whole step while short prompts wait",
        _SCHEDULER,
        "return max(1, self._budget // _LONG_PROMPT_SHARE)",
        "return self._budget",
        ("tests/specdec/engine/test_scheduler.py",),
    ),
    Mutant(
        "L1",
        "plans flap between choices that are nearly as fast",
        _LENGTH,
        "if paces.get(present, 0.0) * (1 + MARGIN) >= fastest:",
        "if False:",
        ("tests/specdec/drafting/test_length.py",),
    ),
    Mutant(
        "L2",
        "a probe never ends",
        _CONTROLLER,
        " or self.probe_rounds >= PROBE_ROUNDS:",
        ":",
        ("tests/specdec/drafting/test_controller.py",),
    ),
    Mutant(
        "L3",
        "rounds that began under the plan before are measured as the new one's",
        _CONTROLLER,
        " and sequence.num_rounds >= SETTLE_ROUNDS:",
        ":",
        ("tests/specdec/drafting/test_controller.py",),
    ),
    Mutant(
        "L4",
        "a length that was given up is never tried again",
        _LENGTH,
        "return self._num_skips[load] % PROBE_EVERY == 0",
        "return False",
        ("tests/specdec/drafting/test_length.py",),
    ),
    Mutant(
        "L5",
        "refused tokens do not lower the acceptance rate",
        _LENGTH,
        "kind in (TokenKind.ACCEPTED, TokenKind.CORRECTED)",
        "kind is TokenKind.ACCEPTED",
        ("tests/specdec/drafting/test_length.py",),
    ),
    Mutant(
        "L6",
        "a draft that gains hardly anything is not turned off",
        _LENGTH,
        "return winner if paces[winner] > paces[off] * (1 + GAIN) else off",
        "return winner",
        ("tests/specdec/drafting/test_length.py",),
    ),
    Mutant(
        "L7",
        "a pause of the target counts against the plan that was in force",
        _CONTROLLER,
        "num_predicted = min(seconds * predicted, 4.0 * num_tokens)",
        "num_predicted = seconds * predicted",
        ("tests/specdec/drafting/test_controller.py",),
    ),
    Mutant(
        "D1",
        "a slot that is granted to a request that has just gone is lost",
        _ADMISSION,
        "                self._give_back(key, count)\n            self._admit()",
        "                pass\n            self._admit()",
        _test(
            "deployments/http/test_admission.py", "test_a_place_given_to_one_that_gives_up_at_that_moment_is_given_on"
        ),
    ),
    Mutant(
        "D2",
        "a key that holds nothing has no precedence when its request is larger than its share",
        _ADMISSION,
        "return not held or held + waiter.count <= share",
        "return held + waiter.count <= share",
        _test(
            "deployments/http/test_admission.py",
            "test_a_key_that_holds_nothing_is_below_its_share_however_large_its_request",
        ),
    ),
    Mutant(
        "D3",
        "small requests starve a large one",
        _ADMISSION,
        "            if waiter.num_overtaken >= _MOST_OVERTAKEN:\n                return None\n",
        "",
        _test(
            "deployments/http/test_admission.py",
            "test_one_that_does_not_fit_lets_others_pass_and_has_its_turn_after_sixteen",
        ),
    ),
    Mutant(
        "D4",
        "a request that leaves twice gives back twice",
        _ADMISSION,
        "            self._num_bytes = -1\n",
        "",
        _test("deployments/http/test_admission.py", "test_whoever_gives_up_leaves_nothing_behind"),
    ),
    Mutant(
        "D5",
        "a body larger than its key's share is refused if it comes in parts",
        _ADMISSION,
        "held = self._bytes[key] - own ",
        "held = self._bytes[key] ",
        _test("deployments/http/test_admission.py", "test_a_body_larger_than_its_keys_share_may_come_in_several_parts"),
    ),
    Mutant(
        "D6",
        "higher limits let nobody in",
        _ADMISSION,
        "                waiter.granted.set_exception(self._too_many())\n        self._admit()",
        "                waiter.granted.set_exception(self._too_many())",
        _test("deployments/http/test_admission.py", "test_higher_limits_let_in_who_waits_at_once"),
    ),
    Mutant(
        "D7",
        "requests that wait are served in order of arrival whatever their priority",
        _ADMISSION,
        '        self._make_room_to_wait(key)\n        insort(self._waiting, waiter, key=attrgetter("priority"))',
        "        self._make_room_to_wait(key)\n        self._waiting.append(waiter)",
        _test(
            "deployments/http/test_admission.py",
            "test_a_better_priority_overtakes_those_who_wait_but_not_a_key_below_its_share",
        ),
    ),
)


def copy_tree(folder: Path) -> None:
    """Copy what git tracks, and what it would, as it stands in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run pytest in a copy of the tree; its exit code and output.

    A fork of this process runs it, which has imported what takes seconds, and nothing of the tree.
    """
    with tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            code: int = pytest.ExitCode.INTERNAL_ERROR
            try:
                os.chdir(folder)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                sys.path.insert(0, str(folder))
                for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                    del sys.modules[name]
                code = pytest.main(["-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", *arguments])
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log.seek(0)
        return code, log.read().decode(errors="replace")


def prepare() -> None:
    """Import what nearly every finder imports, and write no bytecode: it could outlive the source it is of."""
    sys.dont_write_bytecode = True
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("torch", "transformers", "hypothesis", "scipy.stats", "pydantic"):
        importlib.import_module(name)


def run_mutant(folder: Path, mutant: Mutant) -> tuple[Verdict, str]:
    """Break a line in the copy, run its finder, and mend the line; the verdict, and the test that failed."""
    path = folder / mutant.file
    source = path.read_text()
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        code, output = run_tests(folder, "-x", *mutant.finder)
    finally:
        path.write_text(source)
    failed = [line for line in output.splitlines() if line.startswith("FAILED ")]
    verdicts: dict[int, Verdict] = {0: "survived", 1: "caught"}
    return verdicts.get(code, "failed to run"), failed[0] if failed else "" if code == 0 else output[-2000:]


def run_rules(folder: Path, names: Sequence[str]) -> dict[str, Verdict]:
    """Switch rules of the protocol off, all if none is named; their tests pass where a schedule finds it."""
    ids = [f"{RULES}::{RULE}[{name}]" for name in names] or [f"{RULES}::{RULE}"]
    code, output = run_tests(folder, "-rA", *ids)
    found: dict[str, Verdict] = {}
    for line in output.splitlines():
        result, _, test = line.partition(f" {RULES}::{RULE}[")
        if test and result in ("PASSED", "FAILED"):
            found[test.partition("]")[0]] = "caught" if result == "PASSED" else "survived"
    if not found or code > 1:
        print(output[-2000:])
        return dict.fromkeys(names or ["rules"], "failed to run") | found
    return found


def main(names: Sequence[str]) -> int:
    """Run what is named, or everything; 1 if something survives that has no reason to, 2 if it could not be run."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    rules = [name for name in names if name not in {mutant.name for mutant in MUTANTS} | {"rules"}]
    counts = dict.fromkeys(("caught", "survived", "failed to run"), 0)
    prepare()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy_tree(folder)
        if chosen:
            code, output = run_tests(folder, *sorted({test for mutant in chosen for test in mutant.finder}))
            if code != 0:
                print(output[-4000:], "\nThe finders fail on the tree as it is: mend that first.")
                return 2
        for mutant in chosen:
            start_s = time.monotonic()
            verdict, detail = run_mutant(folder, mutant)
            survives = verdict == "survived" and mutant.reason
            counts[verdict] += not survives
            why = f" as it may ({mutant.reason})" if survives else ""
            print(f"{mutant.name:4} {verdict}{why} in {time.monotonic() - start_s:.0f} s: {mutant.fault}", flush=True)
            if detail:
                print(f"     {detail}", flush=True)
        if rules or "rules" in names or not names:
            for rule, verdict in run_rules(folder, rules if "rules" not in names else ()).items():
                counts[verdict] += 1
                print(f"{rule} {verdict}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 2 if counts["failed to run"] else int(counts["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
