"""The rows of the walk over all keys, by kind of command; `tests.config.trees` has the trees."""
