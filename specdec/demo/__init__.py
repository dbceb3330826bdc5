"""The demo pair: two small Llama models with one tokenizer, trained on Python sources."""
