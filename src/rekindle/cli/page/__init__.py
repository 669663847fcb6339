"""Serves the page of ``rekindle ui``: jobs as they are now, and as their files tell of them."""
