"""Lets the launchers of several nodes meet, also when any one of them is lost."""
