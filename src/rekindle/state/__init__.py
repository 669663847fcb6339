"""Between live training state and the bytes of a snapshot. The only layer, with what lies above it, that knows torch."""
