"""What does a model's folder say? Its shape, tokenizer, vocabulary and fingerprint. No torch."""
