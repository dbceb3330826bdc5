"""The same, drafting and verifying in turn."""

from __future__ import annotations

from run_service import main
from run_service_vllm import ENGINE

if __name__ == "__main__":
    main(engine=ENGINE, mode="sequential")
