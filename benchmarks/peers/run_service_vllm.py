"""This project's service, its target in vLLM: eager, in the environment that ``make setup-vllm`` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_service import main

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
ENGINE: dict[str, Any] = {
    "engine": "vllm",
    "python": str(PYTHON),
    "engine_args": {"enforce_eager": True},
    "kv_cache_memory": 1 << 30,
}

if __name__ == "__main__":
    main(engine=ENGINE)
