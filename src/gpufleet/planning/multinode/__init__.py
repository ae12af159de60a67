"""Replicas over several nodes: networks, ports, launch modes, prefill and decode.  Pure."""
