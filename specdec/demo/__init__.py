"""The demo pair: two small Llama models with one tokenizer, and a hybrid target for the same draft."""
