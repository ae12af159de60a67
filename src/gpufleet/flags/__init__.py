"""The flags that `vllm serve` of each release accepts, read from that release's own source.

`schema` holds them as values, `extract` reads them from a release, `command_line` parses with them.
"""
