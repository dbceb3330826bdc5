"""The world of text: tokenizing, incremental detokenizing, stop strings, chat templates."""
