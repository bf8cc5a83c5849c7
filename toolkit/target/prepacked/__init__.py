"""The fast path of a target on a CPU: layers recognised, weights prepacked, files read in place."""
