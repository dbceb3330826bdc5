"""Steps that fail half-way, and leases that run out: no half-moved state is used, and nothing is held for nobody."""

import random
from contextlib import suppress

import pytest
from transformers import PreTrainedModel

from specdec.core.messages import Epoch, Live, Open, Plan
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.sequences import DECIDED, SequenceStates
from specdec.engine.target import ModelTarget
from specdec.executor.rows import RowInput
from specdec.executor.snapshot_runner import SnapshotRunner
from specdec.models.loading import prepare_model
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.leases import Times
from specdec.protocol.target import TargetMachine
from specdec.sampling.pipeline import Sampler
from tests.sizes import some
from tests.specdec.engine.pairs import MAX_MODEL_LEN, Output, add_noise, assert_same, deliver, greedy, start
from tests.specdec.models.recurrent_families import VOCAB_SIZE, make_recurrent
from tests.thorough.engine.test_recurrent import NOISE, in_use, make_cases, make_runner, make_service


class _StepError(Exception):
    """As a device that is out of memory would raise one."""


def fail_now_and_then(model: PreTrainedModel, share: float, seed: int) -> list[int]:
    """Let some calls of a model fail after all of its layers but the last; gives a list that grows with each."""
    rng, failures = random.Random(seed), list[int]()

    def fail(*_: object) -> None:
        if rng.random() < share:
            failures.append(1)
            raise _StepError

    model.base_model.layers[-1].register_forward_pre_hook(fail)
    return failures


def assert_exact(outputs: list[Output], cases: list, stock: PreTrainedModel, **options: object) -> None:
    """What ended well is the whole text; what failed alone twice ended with an error, after the beginning of it."""
    for output, case in zip(outputs, cases, strict=True):
        want = greedy(stock, case, **options)
        if output.finish == "error":
            assert output.tokens == want[: len(output.tokens)]
        else:
            assert_same(output.tokens, want, case, stock)
    assert sum(output.finish != "error" for output in outputs) >= len(outputs) // 2


def run_with_failures(service: InProcessService, cases: list) -> list[Output]:
    names = start(service, cases)
    outputs = {name: Output() for name in names}
    for _ in range(2000):
        with suppress(_StepError):
            deliver(service, outputs)
        if all(output.finish is not None for output in outputs.values()):
            for name in names:
                service.cancel(name)
            return list(outputs.values())
    raise AssertionError("never finished")


@pytest.mark.parametrize("family", some(["qwen3_5", "jamba", "lfm2"]))
def test_steps_that_fail_half_way_change_no_token(family: str) -> None:
    models = make_recurrent(family), add_noise(make_recurrent(family), NOISE)
    target, draft = (make_runner(model) for model in models)
    failures = [fail_now_and_then(model, 0.15, seed) for seed, model in enumerate(models)]
    cases, stock = make_cases(), make_recurrent(family)
    assert_exact(run_with_failures(make_service(target, draft), cases), cases, stock)
    assert all(failures)
    assert in_use(target) == in_use(draft) == (0, 0)


def test_a_copied_state_that_a_failed_step_has_moved_is_not_used() -> None:
    def runner(model: PreTrainedModel) -> SnapshotRunner:
        return SnapshotRunner(prepare_model(model, "rwkv"), num_blocks=200, block_size=4, reads_many=True)

    models = make_recurrent("rwkv"), add_noise(make_recurrent("rwkv"), NOISE)
    target, draft = map(runner, models)
    failures: list[int] = []
    rng = random.Random(3)

    def fail(*_: object) -> None:
        if rng.random() < 0.1:
            failures.append(1)
            raise _StepError

    models[0].rwkv.blocks[-1].register_forward_pre_hook(fail)
    cases, stock = make_cases()[:3], make_recurrent("rwkv")
    assert_exact(run_with_failures(make_service(target, draft), cases), cases, stock, use_cache=False)
    assert len(failures) > 2
    assert in_use(target) == in_use(draft) == (0, 0)


def test_tokens_read_again_are_counted_up_only() -> None:
    """A copy that another sequence left may cover more than was cached before: nothing is read again then."""
    runner = make_runner(make_recurrent("qwen3_5"))
    states, rng = SequenceStates(runner), random.Random(9)
    tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(90)]

    def read(key: str, wanted: list[int]) -> None:
        states.want(key, wanted, 0, b"", (DECIDED, 0, 0.0, key))
        assert states.allocate(key, 99) is not None
        sequence = states.sequence(key)
        runner.forward([RowInput(sequence, wanted[len(sequence) :], 1)])

    read("one", [*tokens[:20], *(5 for _ in range(40))])
    read("other", tokens[:80])
    states.keep_prefix("other", 80)
    read("one", tokens)
    assert states.num_reread_tokens == 0
    assert states.num_computed_tokens("one") == 90
    states.truncate("one", 81)
    read("one", [*tokens[:10], 6, 7])
    assert states.num_reread_tokens == 10


def test_leases_that_run_out_free_slots_and_blocks_on_both_workers() -> None:
    lengths = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
    runners = [make_runner(make_recurrent("qwen3_5")) for _ in range(2)]
    target = TargetMachine("target", ModelTarget(runners[0], Sampler(VOCAB_SIZE), **lengths), Times())
    drafter = DrafterMachine("drafter", ModelDrafter(runners[1], Sampler(VOCAB_SIZE), **lengths), Times())
    cases, epoch = make_cases()[1:], Epoch(1, 1)
    names = [f"leased-{i}" for i in range(len(cases))]
    for machine in (target, drafter):
        for name, case in zip(names, cases, strict=True):
            machine.receive(Open(name, epoch, "router", tuple(case.prompt), case.spec(), Plan(4), lease_s=5.0), 0.0)
        for _ in range(6):
            machine.step(1.0)
        machine.receive(Live("router", ((names[0], epoch),)), 4.0)
    held = [in_use(runner) for runner in runners]
    for (num_blocks, num_slots), runner in zip(held, runners, strict=True):
        assert num_slots == len(cases)
        assert num_blocks > 10
        for machine in (target, drafter):
            machine.step(6.0)
        assert in_use(runner)[1] == 1, "only the first was renewed"
    for machine in (target, drafter):
        machine.step(10.0)
    assert [in_use(runner) for runner in runners] == [(0, 0), (0, 0)]
