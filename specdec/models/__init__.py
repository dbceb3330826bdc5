"""Loading models, and the caches that can be rolled back."""
