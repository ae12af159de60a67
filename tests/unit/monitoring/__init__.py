"""Tests of what is measured, and of the rules over it."""
