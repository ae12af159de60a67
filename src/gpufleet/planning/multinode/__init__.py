"""Replicas over several nodes: networks, ports, launch methods, prefill and decode.  Pure."""
