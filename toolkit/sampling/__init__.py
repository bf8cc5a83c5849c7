"""From rows of logits to tokens: processors, draft laws and noise."""
