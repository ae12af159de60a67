"""Releases, model files and program archives: names, paths, scripts, and who copies from whom."""
