"""The process that outlives the trainers. It never holds torch, and keeps no state that is not in files."""
