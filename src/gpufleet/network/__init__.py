"""HAProxy, keepalived, LiteLLM and the firewall of nodes, rendered.  Pure."""
