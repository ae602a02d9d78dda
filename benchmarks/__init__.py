"""Side-by-side measurements: pairs run in turn in one process or one go, and their ratio."""
