"""Steps of fixed shapes, which never ask the host."""
