"""Firewall, gateway and LiteLLM of a node."""
