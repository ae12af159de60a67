"""What an upgrade changes together, in which waves, and how long that takes.  Pure."""
