"""Program that runs all short programs of a run in one Python process."""
