"""Assisted generation of transformers as it comes, its settings left alone."""

from __future__ import annotations

from run_assisted import main

if __name__ == "__main__":
    main(is_tuned=False)
