"""Every release of torch that is said to work, each in an environment of its own."""
