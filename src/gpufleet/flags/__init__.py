"""Know the flags that `vllm serve` accepts in each release, from the release's own source.

`schema` has the data classes, `extract` reads a release, `command_line` parses arguments.
"""
