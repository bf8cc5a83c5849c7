"""Saved models: strict readers, comparison of tokenizers and translation between them."""
