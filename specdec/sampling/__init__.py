"""From logits to tokens: the pipeline, the shared noise, the acceptance rules, the finish rules."""
