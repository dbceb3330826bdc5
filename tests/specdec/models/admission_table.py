"""What the check at load finds on every tiny random model, as a table.

python -m tests.specdec.models.admission_table
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from specdec.core.errors import SpecdecError
from specdec.engine.build import BackendOptions, Built, build_target
from specdec.executor.snapshot_runner import SnapshotRunner
from specdec.models.loading import ModelSource
from tests.specdec.models.families import FAMILIES, REFUSED, make_model
from tests.specdec.models.recurrent_families import OPAQUE, RECURRENT, make_recurrent

HEAD = "| family | goes back by | largest difference of a logit | relative error, 0.001 is allowed | seconds |"
OPTIONS = BackendOptions(max_model_len=128, kv_cache_memory=1 << 24)


def route(built: Built) -> str:
    """How a model's sequences are cut back."""
    if built.runner.no_speculation is not None:
        return "a copy, token by token: no speculation"
    if isinstance(built.runner, SnapshotRunner):
        return "a copy and a replay"
    return "a re-scan" if built.loaded.recurrent_layers else "blocks"


def line(family: str, model: PreTrainedModel, folder: Path) -> str:
    """One row of the table."""
    model.save_pretrained(folder)
    try:
        _, built = build_target(ModelSource(str(folder), device="cpu"), OPTIONS)
    except SpecdecError as error:
        return f"| {family} | refused: {str(error).replace(str(folder), 'it')} | | | |"
    found = built.admission
    assert found is not None
    figures = f"{found.max_difference:.1g} | {found.relative_error:.1g} | {found.duration_s:.2f}"
    return f"| {family} | {route(built)} | {figures} |"


def main() -> None:
    """Print the table."""
    makers = dict.fromkeys([*FAMILIES, *REFUSED], make_model) | dict.fromkeys([*RECURRENT, *OPAQUE], make_recurrent)
    sys.stdout.write(f"{HEAD}\n{'|---' * 5}|\n")
    for family, make in makers.items():
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f"{line(family, make(family), Path(folder))}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
