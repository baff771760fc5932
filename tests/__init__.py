"""A package, so that tests can share `tests.tiny` and its neighbours."""
