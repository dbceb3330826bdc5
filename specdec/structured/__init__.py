"""How is output held to a grammar, and how are tool calls and reasoning read from it?"""
