"""Decoding: steps, batches, requests and streams."""
