"""What does a model's folder say? Its shape, tokenizer, vocabulary, fingerprint; without torch but for `vocabulary`."""
