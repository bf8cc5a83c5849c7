"""Fast path of a target on a CPU: recognises layers, prepacks weights, reads GGUF blocks in place."""
