"""Decoder layers compiled by torch's Inductor, all but their attention.

On a CPU a decoding step of a small model is to a large part Python between operators, and operators too small to be
worth a call. Inductor makes one loop of those that follow each other. Layers that differ in their weights' numbers
alone are compiled once ("regional compilation"), and for any number of tokens: depth costs little time to start. The
graphs use as many threads as torch does when they are made.
"""

from specdec.models.compiled.layers import CompileReport, compile_layers

__all__ = ["CompileReport", "compile_layers"]
