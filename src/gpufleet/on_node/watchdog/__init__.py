"""The watchdog: a program that detects stalled servers and restarts them."""
