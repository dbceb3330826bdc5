"""What does a model's folder say? Its shape, tokenizer, vocabulary and fingerprint; all but `vocabulary` without torch."""
