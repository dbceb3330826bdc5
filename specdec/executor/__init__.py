"""How does a step run? Arrays in, arrays out, over a transformers model."""
