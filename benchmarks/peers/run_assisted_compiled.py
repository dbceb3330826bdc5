"""Assisted generation of transformers, with the draft length that was asked for and compiled layers."""

from __future__ import annotations

from run_assisted import main

if __name__ == "__main__":
    main(is_compiled=True)
