"""Every setting that operators write, with its default and meaning."""
