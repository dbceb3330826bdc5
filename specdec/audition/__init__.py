"""Recorded answers: what a draft would have earned on them or learns from them, and whether a target repeats them."""
