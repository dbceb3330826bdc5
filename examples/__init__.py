"""Complete programs around the product; ``train_draft`` makes a draft model for a target."""
