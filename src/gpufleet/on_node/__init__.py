"""Programs that run on the node: sent over SSH's stdin, Python 3.8, standard library only.

They install nothing and leave nothing behind. Each prints one JSON document as its last line.
"""
