"""What is wrong with a fleet, worst first, each with its evidence and what to do."""
