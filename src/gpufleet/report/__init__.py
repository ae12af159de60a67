"""Write a fleet as a page for people without access, and as a manifest that rebuilds it."""
