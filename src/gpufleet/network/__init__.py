"""Render the nodes' HAProxy, keepalived, LiteLLM and firewall. Pure."""
