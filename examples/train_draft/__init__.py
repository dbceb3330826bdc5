"""Makes the demo pair: corpus, tokenizer, target, draft, figures. Run as ``python -m examples.train_draft``."""
