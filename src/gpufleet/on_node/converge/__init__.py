"""Read a node's state in one program, and place files."""
