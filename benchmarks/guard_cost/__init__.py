"""Measure what the guard of servers costs a request."""
