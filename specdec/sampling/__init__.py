"""From logits to tokens: the pipeline, the shared noise, the acceptance rule, the finish rules."""
