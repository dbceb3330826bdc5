"""Makes the demo pair: corpus, tokenizer, target, distilled draft, figures. Run as ``python -m tests.training``."""
