"""Bad input: everything that is parsed, given what nobody would write. ``python -m tests.fuzz`` looks for more."""
