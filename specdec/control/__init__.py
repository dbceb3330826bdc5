"""How much to speculate: estimates from measurements, limits of each mode, and the choice between them.

Pure functions and frozen dataclasses, but for :class:`specdec.control.controller.Controller`, which holds the newest
measurements. No clock, no thread, no randomness.
"""
