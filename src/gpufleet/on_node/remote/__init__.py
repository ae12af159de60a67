"""One Python for all short programs of a run."""
