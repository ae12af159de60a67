"""List the conditions to meet before users come, each with its proof. Pure."""
