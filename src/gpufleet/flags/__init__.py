"""The flags that `vllm serve` of each release accepts, read from that release's own source.

`schema` holds it as values, `extract` reads it from a release, `command_line` parses by it.
"""
