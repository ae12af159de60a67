"""Is a replica after the change what it was before?  Pure."""
