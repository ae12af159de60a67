"""Answers of stages and their servers."""
