"""An OpenAI-compatible server on an engine, and the page that shows what it does."""
