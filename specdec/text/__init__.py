"""Text and tokens: tokenizing, incremental detokenizing, stop strings, chat templates."""
