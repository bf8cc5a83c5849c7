"""Trainable networks of drafters, saved and loaded as transformers' ``PreTrainedModel``.

They are imported only where one is used, because transformers takes seconds to import.
"""
