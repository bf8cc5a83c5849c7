"""Interface to Hugging Face: runs any causal LM on packed rows; ``prepacked`` is the fast path on a CPU."""
