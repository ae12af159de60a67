"""
Releases, model files and program archives: names, paths, scripts, and which node copies from which.
"""
