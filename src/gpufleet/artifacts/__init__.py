"""
Names, paths and scripts of releases, model files and program archives, and the plan of copies
between nodes.
"""
