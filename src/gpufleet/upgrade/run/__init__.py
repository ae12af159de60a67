"""One upgrade under way: its journal, what is done next, and the nodes and gateways it acts on."""
