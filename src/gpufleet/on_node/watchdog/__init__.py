"""Program that detects and restarts stalled servers."""
