"""This project's engine in one process, its layers compiled."""

from __future__ import annotations

from run_ours import main

if __name__ == "__main__":
    main(is_compiled=True)
