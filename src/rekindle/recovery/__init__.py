"""Coming back after a fault: who is there, and which checkpoint to continue from."""
