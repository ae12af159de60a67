"""
Diagnose a fleet: list its problems, the worst first, each with its evidence and the next step.
"""
