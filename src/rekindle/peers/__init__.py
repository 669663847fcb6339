"""Lets the agents and the trainers of several nodes speak with each other, over TCP; never imports torch."""
