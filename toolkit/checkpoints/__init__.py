"""Saved models: read strictly, told apart, compared."""
