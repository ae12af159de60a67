"""Programs that run on the node: sent over SSH's stdin, Python 3.8, standard library only.

Nothing is installed and nothing stays behind. Each prints one JSON document as its last line.
"""
