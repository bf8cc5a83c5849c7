"""OpenAI-compatible server on top of an engine, with its web page."""
