"""What stages and their servers answer."""
