"""The package of a script that looks at what it was given."""
