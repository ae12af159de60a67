"""A node while the fleet is changed."""
