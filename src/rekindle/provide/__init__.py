"""Stand-ins for modules of other products, each a folder. ``path`` makes them importable under the foreign names."""
