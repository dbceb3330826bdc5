"""Complete programs around the product."""
