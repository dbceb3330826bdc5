"""How is a model's text read as tool calls, reasoning and answer?"""
