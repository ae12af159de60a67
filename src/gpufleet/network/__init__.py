"""Render the configuration of HAProxy, keepalived, LiteLLM and the firewall on nodes. Pure."""
