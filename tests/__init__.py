"""The tests; a package, so that spawned children find them under the name pytest gave them."""
