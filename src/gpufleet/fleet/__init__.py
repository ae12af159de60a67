"""What one run knows of all nodes: they are probed, judged and planned once."""
