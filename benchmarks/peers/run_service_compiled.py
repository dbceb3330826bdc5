"""This project's service over HTTP, its layers compiled."""

from __future__ import annotations

from run_service import main

if __name__ == "__main__":
    main(is_compiled=True)
