"""Inference engines. Each engine has a folder with everything that is specific to it."""
