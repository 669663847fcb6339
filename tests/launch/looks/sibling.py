"""Found by a relative import."""

NAME = __name__
