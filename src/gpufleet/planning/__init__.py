"""Plan which replica runs on which GPUs, and how it is divided. Pure."""
