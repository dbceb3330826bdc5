"""What an assistant's text says: content, reasoning, tool calls; from text in pieces, cut anywhere."""
