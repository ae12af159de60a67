"""SGLang: its releases' flags."""
