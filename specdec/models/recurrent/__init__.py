"""Recurrent layers: states per sequence that can be rolled back, and the scans that move them."""
