"""Steps, batches, requests and streams: how parts decode together."""
