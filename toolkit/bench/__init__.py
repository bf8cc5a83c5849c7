"""Measurements: programs that print tables and write JSON with provenance."""
