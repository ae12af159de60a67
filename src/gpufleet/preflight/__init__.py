"""Check the conditions for opening a fleet to users, each with its proof. Pure."""
