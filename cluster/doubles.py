"""Stand-ins that the configuration asks for: emulated devices, scripted tokens."""

from __future__ import annotations

from cluster.config import AppArgs
from cluster.sources import target_source
from specdec.engine.emulation import Clock, EmulatedDevice, EmulatedDrafter, EmulatedTarget
from specdec.engine.scripted import Script, ScriptedDrafter, ScriptedTarget, plain_token_ids
from specdec.models.compat import tokenizer_width
from specdec.models.describe import describe_model
from specdec.models.loading import load_tokenizer
from specdec.protocol.backends import DraftBackend, TargetBackend


def emulated_target(args: AppArgs, backend: TargetBackend, clock: Clock | None = None) -> TargetBackend:
    """The backend on its emulated device; itself where the configuration gives none."""
    cost = args.step_costs.get("target")
    return backend if cost is None else EmulatedTarget(backend, EmulatedDevice(cost, clock))


def emulated_drafter(args: AppArgs, backend: DraftBackend, clock: Clock | None = None) -> DraftBackend:
    """The backend on its emulated device; itself where the configuration gives none."""
    cost = args.step_costs.get("draft")
    return backend if cost is None else EmulatedDrafter(backend, EmulatedDevice(cost, clock))


def scripted_pair(args: AppArgs) -> tuple[ScriptedTarget, ScriptedDrafter]:
    """Backends that say what the configuration's script does, in tokens of the target's tokenizer.

    Raises:
        ModelLoadError: There is no such tokenizer or configuration.
    """
    rate = args.scripted.acceptance_rate
    assert rate is not None, "nothing is scripted"
    source = target_source(args)
    tokenizer = load_tokenizer(source)
    script = Script(rate, args.scripted.next_guess_rate, plain_token_ids(tokenizer, tokenizer_width(tokenizer)))
    own = describe_model(source).max_model_len
    max_model_len = min(own, args.max_model_len or own)
    return ScriptedTarget(script, max_model_len), ScriptedDrafter(script, max_model_len)


def stand_ins(args: AppArgs) -> tuple[str, ...]:
    """What a table must say about figures that a configuration gives; empty where all is real."""
    notes = []
    if args.emulate_step_ms is not None:
        notes.append(f"emulated devices: {args.emulate_step_ms} (ms a step)")
    if args.is_scripted:
        script = args.scripted
        notes.append(
            f"scripted tokens: acceptance {script.acceptance_rate:g}, true token among the next three guesses "
            f"{script.next_guess_rate:g}"
        )
    return tuple(notes)
