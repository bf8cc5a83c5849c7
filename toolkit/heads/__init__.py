"""Trainable networks behind drafters, as transformers' ``PreTrainedModel``: saved and loaded like any model.

They are imported only where one is used, for transformers takes seconds to import.
"""
