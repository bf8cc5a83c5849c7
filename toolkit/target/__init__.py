"""The boundary to Hugging Face: any causal LM on packed rows, and its fast path."""
