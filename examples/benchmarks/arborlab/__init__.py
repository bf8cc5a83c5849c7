"""The laboratory: programs of the source checkout that measure GPUs and verifiers, tune drafts and draw figures."""
