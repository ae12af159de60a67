"""Validate, explain and compare flags of `vllm serve`, from the source of each release.

`schema` has the data classes, `extract` reads a release, `command_line` parses arguments.
"""
