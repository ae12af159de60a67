"""What a log says about a failure, by rules that are data."""
