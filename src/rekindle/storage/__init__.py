"""Where checkpoints are kept, and how a shard gets from one store to another. No torch here."""
