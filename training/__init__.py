"""Training drafters and deciders for a target."""
