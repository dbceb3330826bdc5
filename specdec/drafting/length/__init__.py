"""How many tokens are drafted, and in which mode? The controller."""
