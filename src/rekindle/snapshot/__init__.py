"""The bytes of a snapshot: names, layout, receipts, and the memory that holds them. Standard library only."""
