"""Programs that run on nodes. The controller sends them over SSH to a Python's standard input.

They need only Python 3.8 and its standard library. They install nothing and leave nothing behind.
Each program prints one JSON document as its last line.
"""
