"""Programs for the firewall, the gateway and LiteLLM of a node."""
