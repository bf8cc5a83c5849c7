"""Steps of fixed shapes that never ask the host."""
