"""Between live training state and the bytes of a snapshot. Only this layer, and those above, know torch."""
