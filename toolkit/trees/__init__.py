"""Draft trees: their static shape, masks, values and pictures."""
