"""Know the flags that `vllm serve` accepts in each release, read from the release's own source.

`schema` holds them as values, `extract` reads them from a release, `command_line` parses with them.
"""
