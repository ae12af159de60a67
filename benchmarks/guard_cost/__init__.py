"""What the guard of servers costs a request."""
