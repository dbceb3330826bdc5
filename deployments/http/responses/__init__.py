"""``/v1/responses``, as a form of chat completions."""
